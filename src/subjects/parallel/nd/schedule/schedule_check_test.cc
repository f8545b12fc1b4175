// SPDX-License-Identifier: Apache-2.0
// Every rule of the checker, broken by one change of a right table.
#include "subjects/parallel/nd/schedule/schedule_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/every_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_text.h"

namespace isoshard {
namespace {

using enum PipelineRule;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr PipelineSpec k1F1BOnTwo{PipelineKind::k1F1B, 2, 1, StagePlacement::kLoop, 3};
constexpr PipelineSpec kZeroBubbleOnTwo{PipelineKind::kInterleavedZeroBubble, 2, 1,
                                        StagePlacement::kLoop, 2};

std::vector<PipelineFinding> check_csv(const PipelineSpec& spec, std::string_view csv) {
  return check(schedule_from_csv(spec, csv, "test"));
}

std::vector<std::string> messages(const std::vector<PipelineFinding>& findings) {
  std::vector<std::string> all;
  for (const PipelineFinding& finding : findings)
    all.push_back(std::string(to_string(finding.rule)) + ": " + finding.message);
  return all;
}

TEST(PipelineCheck, ARightTableHasNoFinding) {
  EXPECT_THAT(check_csv(k1F1BOnTwo, "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"),
              IsEmpty());
  EXPECT_THAT(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"),
              IsEmpty());
}

TEST(PipelineCheck, BackwardsMayBeWholeAndInHalvesInOneTable) {
  EXPECT_THAT(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1W0,1F1,1B1\n"), IsEmpty());
}

TEST(PipelineCheck, RowsAreOneARank) {
  EXPECT_THAT(messages(check_csv(k1F1BOnTwo, "0F0\n1F0\n0F1\n")),
              ElementsAre("rows: the table must have 2 rows, one a rank, got 3"));
}

TEST(PipelineCheck, StagesAndMicroBatchesAreThoseOfTheSpec) {
  EXPECT_THAT(
      messages(check_csv(k1F1BOnTwo, "0F0,0F1,2B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F3,1B2\n")),
      ElementsAre("range: rank 0, time step 2, 2B0: its stage must be below 2, got 2",
                  "range: rank 1, time step 4, 1F3: its micro-batch must be below 3, got 3"));
}

TEST(PipelineCheck, AnActionIsOnTheRankOfItsStage) {
  EXPECT_THAT(
      messages(check_csv(k1F1BOnTwo, "0F0,0F1,0B0,0F2,0B1\n1F0,1B0,1F1,1B1,1F2,1B2,0B2\n")),
      ElementsAre("rank: rank 1, time step 6, 0B2: stage 0 must run on rank 0, got rank 1"));
}

TEST(PipelineCheck, EachActionThatIsMovedToAnotherRankIsFound) {
  const PipelineSchedule right =
      make_schedule({PipelineKind::kInterleaved1F1B, 3, 2, StagePlacement::kV, 2});
  for (std::size_t from = 0; from < right.table.size(); ++from) {
    for (std::size_t step = 0; step < right.table[from].size(); ++step) {
      for (const std::size_t to : {(from + 1) % 3, (from + 2) % 3}) {
        if (!right.table[from][step]) continue;
        PipelineSchedule wrong = right;
        wrong.table[to].insert(wrong.table[to].begin(), *wrong.table[from][step]);
        wrong.table[from][step].reset();

        const std::vector<PipelineFinding> findings = check(wrong);

        ASSERT_FALSE(findings.empty());
        EXPECT_EQ(findings.front().rule, kRank);
        EXPECT_EQ(findings.front().rank, static_cast<int>(to));
        EXPECT_EQ(findings.front().time_step, 0);
        EXPECT_EQ(findings.front().action, right.table[from][step]);
      }
    }
  }
}

TEST(PipelineCheck, AnActionIsThereOnce) {
  EXPECT_THAT(
      messages(check_csv(k1F1BOnTwo, "0F0,0F1,0B0,0F1,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")),
      ElementsAre("twice: rank 0, time step 3, 0F1: an action must be there once, but it is also "
                  "at rank 0, time step 1, 0F1",
                  "memory: rank 0, time step 4, 0F2: the forward activations alive must be at "
                  "most 2 for 1F1B, got 3"));
}

TEST(PipelineCheck, ABackwardIsWholeOrInHalves) {
  EXPECT_THAT(
      messages(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1W0,1F1,1B1,1W1\n")),
      ElementsAre(
          "twice: rank 1, time step 5, 1W1: a backward must be whole or in halves, but rank 1, "
          "time step 4, 1B1 is there, too",
          "blocked: rank 1, time step 5, 1W1: it waits for 1I1, which is missing"));
}

TEST(PipelineCheck, EachActionThatIsTakenOutOfATableIsMissed) {
  for (const PipelineKind kind : {PipelineKind::k1F1B, PipelineKind::kInterleavedZeroBubble}) {
    const PipelineSchedule right = make_schedule({kind, 3, 1, StagePlacement::kLoop, 4});
    for (std::size_t rank = 0; rank < right.table.size(); ++rank) {
      for (std::size_t step = 0; step < right.table[rank].size(); ++step) {
        const auto action = right.table[rank][step];
        if (!action) continue;
        PipelineSchedule wrong = right;
        wrong.table[rank][step].reset();

        const std::vector<PipelineFinding> findings = check(wrong);

        ASSERT_FALSE(findings.empty()) << to_string(*action);
        EXPECT_EQ(findings.front().rule, kMissing) << to_string(*action);
        EXPECT_EQ(findings.front().rank, static_cast<int>(rank));
        EXPECT_EQ(findings.front().action, action);
      }
    }
  }
}

TEST(PipelineCheck, MissingActionsSayWhatTheyAre) {
  EXPECT_THAT(
      messages(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0I0,0W0,0I1\n1F0,1I0,1F1,1I1,1W0,1W1\n")),
      ElementsAre("missing: rank 0: 0W1 (the backward_weight of stage 0, micro-batch 1) must be "
                  "there, but no time step has it"));
  EXPECT_THAT(
      messages(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1\n")),
      ElementsAre("missing: rank 1: 1B1 (the backward of stage 1, micro-batch 1) must be there, "
                  "but no time step has it",
                  "blocked: rank 0, time step 4, 0I1: it waits for 1B1, which is missing"));
}

TEST(PipelineCheck, ARankRunsWhatAnActionNeedsBeforeIt) {
  EXPECT_THAT(
      messages(check_csv(k1F1BOnTwo, "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1B2,1F2\n")),
      ElementsAre("order: rank 1, time step 4, 1B2: 1F2 must run before it, but comes at time "
                  "step 5",
                  "blocked: rank 0, time step 5, 0B2: it waits for rank 1, time step 4, 1B2, "
                  "which rank 1 never reaches"));
  EXPECT_THAT(
      messages(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0W0,0I0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")),
      ElementsAre("order: rank 0, time step 2, 0W0: 0I0 must run before it, but comes at time "
                  "step 3"));
}

TEST(PipelineCheck, NoRanksWaitForEachOther) {
  EXPECT_THAT(
      messages(check_csv(k1F1BOnTwo, "0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1F1,1B0,1B1,1F2,1B2\n")),
      ElementsAre("blocked: rank 0, time step 1, 0B0: it waits for rank 1, time step 2, 1B0, "
                  "which rank 1 never reaches",
                  "blocked: rank 1, time step 1, 1F1: it waits for rank 0, time step 2, 0F1, "
                  "which rank 0 never reaches",
                  HasSubstr("memory: rank 1, time step 1, 1F1")));
}

TEST(PipelineCheck, ARankStaysWithinItsMemory) {
  const std::string_view csv = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n";
  PipelineSpec free = k1F1BOnTwo;
  free.kind = PipelineKind::kCustom;

  EXPECT_THAT(messages(check_csv(k1F1BOnTwo, csv)),
              ElementsAre("memory: rank 0, time step 2, 0F2: the forward activations alive must be "
                          "at most 2 for 1F1B, got 3"));
  EXPECT_THAT(check_csv(free, csv), IsEmpty());
  EXPECT_THAT(messages(check(schedule_from_csv(free, csv, "test"), std::vector{3, 0})),
              ElementsAre(HasSubstr("memory: rank 1, time step 0, 1F0: the forward activations "
                                    "alive must be at most 0 for Custom, got 1")));
  EXPECT_THAT(peak_activations(schedule_from_csv(free, csv, "test")), ElementsAre(3, 1));
}

TEST(PipelineCheck, AnActivationLivesUntilItsWeightGradient) {
  EXPECT_THAT(messages(check_csv(kZeroBubbleOnTwo,
                                 "0F0,0F1,0I0,0I1,0W0,0W1\n"
                                 "1F0,1I0,1F1,1I1,1W0,1W1\n")),
              IsEmpty());
  EXPECT_THAT(messages(check(schedule_from_csv(kZeroBubbleOnTwo,
                                               "0F0,0F1,0I0,0W0,0I1,0W1\n"
                                               "1F0,1I0,1F1,1I1,1W0,1W1\n",
                                               "test"),
                             std::vector{2, 1})),
              ElementsAre(HasSubstr("memory: rank 1, time step 2, 1F1")));
}

TEST(PipelineCheck, GradientsAreAddedInAscendingOrder) {
  const PipelineSpec gpipe{PipelineKind::kGPipe, 2, 1, StagePlacement::kLoop, 3};
  EXPECT_THAT(
      messages(check_csv(gpipe, "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n")),
      ElementsAre("gradient_order: rank 0, time step 4, 0B1: gradients of stage 0 must be added "
                  "in ascending order of micro-batches, but rank 0, time step 3, 0B2 comes before "
                  "it",
                  HasSubstr("gradient_order: rank 1, time step 4, 1B1")));
  EXPECT_THAT(
      messages(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1I0,1F1,1I1,1W0,1W1\n")),
      ElementsAre(HasSubstr("gradient_order: rank 0, time step 5, 0W0")));
  EXPECT_THAT(
      messages(check_csv(kZeroBubbleOnTwo, "0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I1,1I0,1W0,1W1\n")),
      IsEmpty())
      << "inputs' gradients add up nowhere, so their order is free";
}

TEST(PipelineCheck, EverySwapWithinOneStageAndMicroBatchIsFound) {
  int swapped = 0;
  const PipelineSchedule right =
      make_schedule({PipelineKind::kInterleavedZeroBubble, 2, 2, StagePlacement::kLoop, 4});
  for (std::size_t rank = 0; rank < right.table.size(); ++rank) {
    const auto& row = right.table[rank];
    for (std::size_t first = 0; first < row.size(); ++first) {
      for (std::size_t second = first + 1; second < row.size(); ++second) {
        if (!row[first] || !row[second] || row[first]->stage != row[second]->stage ||
            row[first]->micro_batch != row[second]->micro_batch)
          continue;
        PipelineSchedule wrong = right;
        std::swap(wrong.table[rank][first], wrong.table[rank][second]);

        EXPECT_FALSE(check(wrong).empty())
            << to_string(*row[first]) << " and " << to_string(*row[second]);
        ++swapped;
      }
    }
  }
  EXPECT_EQ(swapped, 4 * 4 * 3);
}

TEST(PipelineCheckReport, ListsAllFindingsInOneError) {
  try {
    require_sound(schedule_from_csv(k1F1BOnTwo, "0F0\n1F0\n0F1\n", "test"));
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "the pipeline schedule 1F1B must keep all rules, but breaks 1:\n"
                 "  rows: the table must have 2 rows, one a rank, got 3");
  }
  EXPECT_NO_THROW(require_sound(make_schedule(k1F1BOnTwo)));
}

TEST(PipelineCheckReport, RefusesASpecOrBoundThatIsNone) {
  EXPECT_THROW((void)check({{.pp = 0}, {}}), UsageError);
  EXPECT_THROW((void)check(make_schedule(k1F1BOnTwo), std::vector{1, 2, 3}), UsageError);
}

}  // namespace
}  // namespace isoshard
