// SPDX-License-Identifier: Apache-2.0
// Names, placement, refusals, and what holds for every schedule.
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/every_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_check.h"
#include "subjects/parallel/nd/schedule/schedule_simulation.h"
#include "subjects/parallel/nd/schedule/schedule_text.h"

namespace isoshard {
namespace {

using enum PipelineKind;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Le;

template <class Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string refusal(const PipelineSpec& spec) {
  return message_of([&] { require_schedulable(spec); });
}

std::vector<int> ranks_of_stages(const PipelineSpec& spec) {
  std::vector<int> ranks;
  for (int stage = 0; stage < num_stages(spec); ++stage)
    ranks.push_back(rank_of_stage(spec, stage));
  return ranks;
}

TEST(PipelineNames, AreThoseOfTorchInAnyCase) {
  EXPECT_EQ(pipeline_kind_of("gpipe"), kGPipe);
  EXPECT_EQ(pipeline_kind_of("1F1B"), k1F1B);
  EXPECT_EQ(pipeline_kind_of("interleaved_1f1b"), kInterleaved1F1B);
  EXPECT_EQ(pipeline_kind_of("InterleavedZeroBubble"), kInterleavedZeroBubble);
  EXPECT_EQ(pipeline_kind_of("zb1p"), kInterleavedZeroBubble);
  EXPECT_EQ(pipeline_kind_of("zbv"), kZbvZeroBubble);
  EXPECT_EQ(to_string(pipeline_kind_of("ZBVZeroBubble")), "ZBVZeroBubble");
  EXPECT_EQ(to_string(pipeline_kind_of("zb1p")), "InterleavedZeroBubble");
}

TEST(PipelineNames, OthersAreRefused) {
  EXPECT_THROW((void)pipeline_kind_of("LoopedBFS"), NotBuiltError);
  EXPECT_THROW((void)pipeline_kind_of("dualpipev"), NotBuiltError);
  EXPECT_THAT(message_of([] { (void)pipeline_kind_of("Interleaved1F1"); }),
              AllOf(HasSubstr("pipeline schedule must be one of GPipe, 1F1B, Interleaved1F1B"),
                    HasSubstr("got 'Interleaved1F1' (did you mean 'Interleaved1F1B'?)")));
}

TEST(PipelinePlacement, GoesRoundOrUpAndDown) {
  EXPECT_THAT(ranks_of_stages({kInterleaved1F1B, 3, 3, StagePlacement::kLoop, 3}),
              ElementsAre(0, 1, 2, 0, 1, 2, 0, 1, 2));
  EXPECT_THAT(ranks_of_stages({kInterleaved1F1B, 3, 3, StagePlacement::kV, 3}),
              ElementsAre(0, 1, 2, 2, 1, 0, 0, 1, 2));
  EXPECT_THAT(ranks_of_stages({kInterleaved1F1B, 1, 2, StagePlacement::kV, 3}), ElementsAre(0, 0));
  EXPECT_THAT(stages_of_rank({kInterleaved1F1B, 3, 3, StagePlacement::kV, 3}, 1),
              ElementsAre(1, 4, 7));
  EXPECT_THAT(stages_of_rank({kInterleaved1F1B, 3, 2, StagePlacement::kLoop, 3}, 1),
              ElementsAre(1, 4));
}

TEST(PipelineRefusals, CountsAreAtLeastOne) {
  EXPECT_EQ(refusal({kGPipe, 0, 1}), "pp must be at least 1, got 0");
  EXPECT_EQ(refusal({kGPipe, 1, -1}), "stages per rank must be at least 1, got -1");
  EXPECT_EQ(refusal({.kind = kGPipe, .micro_batches = 0}),
            "micro-batches must be at least 1, got 0");
}

TEST(PipelineRefusals, SayTheNumbers) {
  constexpr StagePlacement loop = StagePlacement::kLoop, v = StagePlacement::kV;
  EXPECT_EQ(refusal({kGPipe, 2, 2, loop, 4}),
            "stages per rank must be 1 for GPipe, got 2; Interleaved1F1B takes several");
  EXPECT_EQ(refusal({k1F1B, 4, 1, loop, 3}),
            "micro-batches must be at least the number of stages 4 (pp 4 x 1 stages per rank), "
            "got 3; raise the local batch or lower pp");
  EXPECT_EQ(refusal({kInterleaved1F1B, 4, 2, loop, 9}),
            "micro-batches must be a multiple of their 2 rounds (micro-batches / pp) for "
            "Interleaved1F1B on pp 4, got 9; 8 and 10 are such numbers");
  EXPECT_THAT(refusal({kInterleavedZeroBubble, 2, 2, v, 4}),
              HasSubstr("placement must be loop for InterleavedZeroBubble, got V"));
  EXPECT_THAT(refusal({kZbvZeroBubble, 2, 2, loop, 4}),
              HasSubstr("placement must be V for ZBVZeroBubble, got loop"));
  EXPECT_EQ(refusal({kZbvZeroBubble, 2, 3, v, 4}),
            "stages per rank must be 2 for ZBVZeroBubble, got 3");
  EXPECT_THAT(message_of([] { (void)make_schedule({.kind = kCustom}); }),
              HasSubstr("must be read from a file"));
}

TEST(PipelineRefusals, APipelineThatIsNeverFullIsRefusedWhereAsked) {
  EXPECT_NO_THROW(require_filled({kInterleaved1F1B, 4, 2, StagePlacement::kLoop, 8}));
  EXPECT_EQ(message_of([] {
              require_filled({kInterleaved1F1B, 4, 2, StagePlacement::kLoop, 4});
            }),
            "micro-batches must be at least the number of stages 8 (pp 4 x 2 stages per rank), "
            "got 4; raise the local batch or lower pp");
}

TEST(PipelineSchedules, EveryOneIsSound) {
  const std::vector<PipelineSpec> specs = every_spec();

  ASSERT_GT(specs.size(), 1500U);
  for (const PipelineSpec& spec : specs)
    for (const PipelineFinding& finding : check(make_schedule(spec)))
      ADD_FAILURE() << slug(spec) << ": " << finding.message;
}

TEST(PipelineSchedules, EveryOneIsAligned) {
  for (const PipelineSpec& spec : every_spec()) {
    const PipelineSchedule schedule = make_schedule(spec);
    ASSERT_EQ(schedule.table, aligned(schedule).table) << slug(spec);
  }
}

TEST(PipelineSchedules, ZeroBubbleAloneSplitsBackward) {
  for (const PipelineSpec& spec : every_spec()) {
    const bool is_split = spec.kind == kInterleavedZeroBubble || spec.kind == kZbvZeroBubble;
    for (const auto& row : make_schedule(spec).table) {
      for (const auto& action : row) {
        if (!action || action->kind == ActionKind::kForward) continue;
        ASSERT_EQ(action->kind != ActionKind::kBackward, is_split) << slug(spec);
      }
    }
  }
}

TEST(PipelineSchedules, OneRankTakesOneMicroBatchAfterTheOther) {
  EXPECT_EQ(csv_of(make_schedule({k1F1B, 1, 1, StagePlacement::kLoop, 2})), "0F0,0B0,0F1,0B1\n");
  EXPECT_EQ(csv_of(make_schedule({kInterleaved1F1B, 1, 2, StagePlacement::kLoop, 2})),
            "0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1\n");
}

TEST(PipelineMemory, PeaksAreTheFormulaWhereThePipelineIsFull) {
  int full = 0;
  for (const PipelineSpec& spec : every_spec()) {
    // Rounds of ZB-V are full with twice as many micro-batches as ranks. On a V the bound is one
    // that the list scheduler may stay below.
    const bool is_list = spec.kind == kInterleaved1F1B && spec.placement == StagePlacement::kV;
    if (is_list || spec.micro_batches < 2 * spec.pp) continue;
    ++full;
    EXPECT_EQ(peak_activations(make_schedule(spec)), memory_bound(spec)) << slug(spec);
  }
  EXPECT_GT(full, 500);
}

TEST(PipelineMemory, FormulasOfSmallCases) {
  constexpr StagePlacement loop = StagePlacement::kLoop;
  EXPECT_THAT(memory_bound({kGPipe, 4, 1, loop, 8}), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(memory_bound({k1F1B, 4, 1, loop, 8}), ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(memory_bound({kInterleaved1F1B, 4, 2, loop, 8}), ElementsAre(11, 9, 7, 5));
  EXPECT_THAT(memory_bound({kInterleaved1F1B, 4, 2, loop, 4}), ElementsAre(8, 8, 7, 5));
  EXPECT_THAT(memory_bound({kInterleaved1F1B, 4, 2, StagePlacement::kV, 8}), Each(8));
  EXPECT_THAT(memory_bound({kInterleavedZeroBubble, 4, 2, loop, 8}), Each(8));
  EXPECT_THAT(memory_bound({kZbvZeroBubble, 4, 2, StagePlacement::kV, 8}), Each(8));
  EXPECT_THAT(memory_bound({kCustom, 2, 3, loop, 5}), Each(15));
}

TEST(InterleavedOnAV, HoldsNoMoreThanItsStagesAndStartsBackwardAtOnce) {
  const PipelineSpec spec{kInterleaved1F1B, 4, 2, StagePlacement::kV, 8};
  const PipelineSchedule schedule = make_schedule(spec);

  EXPECT_THAT(peak_activations(schedule), Each(Le(8)));
  EXPECT_EQ(std::ranges::max(peak_activations(schedule)), 8);
  // Rank 0 holds the first and the last stage: its first backward follows its last forward.
  EXPECT_EQ(schedule.table[0][7], (PipelineAction{ActionKind::kForward, 7, 0}));
  EXPECT_EQ(schedule.table[0][8], (PipelineAction{ActionKind::kBackward, 7, 0}));
}

TEST(InterleavedOnAV, WithOneStageARankIsAPlainPipeline) {
  const PipelineSpec spec{kInterleaved1F1B, 2, 1, StagePlacement::kV, 3};

  EXPECT_EQ(csv_of(make_schedule(spec)), "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n");
}

}  // namespace
}  // namespace isoshard
