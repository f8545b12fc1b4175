// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing in whole steps: no bit changes,
// collectives are repeated on all ranks, masks are drawn again alike.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "harness/testing/run_world.h"
#include "harness/verdict/equal_runs.h"
#include "subjects/model/zoo/registry.h"
#include "suite/record/batches.h"
#include "suite/record/call_counts.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

Case recomputed(Case item, double dropout) {
  if (dropout > 0) set_dropout(item.config, dropout);
  item.settings.recompute_every = 1;
  return item;
}

std::int64_t num_second_masks(const Trace& trace) {
  std::int64_t count = 0;
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records)
      count += record.key.kind == RecordKind::kMask && role_of(record.key) == NameRole::kRecomputed
                   ? 1
                   : 0;
  }
  return count;
}

class RecomputedStep : public ::testing::TestWithParam<Case> {};

std::vector<Case> recompute_cases() {
  std::vector<Case> all;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    all.push_back(recomputed(step_case("ddp", {.dp = 3}, dtype, "gpt2"), 0.1));
    for (const char* type : {"qwen2", "qwen3", "llama", "gpt2", "megatron_gpt"}) {
      all.push_back(recomputed(step_case("autotp", {.dp = 3, .tp = 2}, dtype, type), 0.1));
    }
  }
  all.push_back(with(recomputed(step_case("autotp", {.dp = 3, .tp = 2}), 0), [](Case& c) {
    c.micro_batches = 2;
    c.steps = 2;
    c.settings.make_vocab_size_divisible_by = 1;
    c.settings.record_partials = true;
    c.model_name += "_partials";
  }));
  // Layers are gathered again before they are run again.
  all.push_back(
      with(recomputed(step_case("fsdp_tp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2"), 0.1),
           [](Case& c) { c.micro_batches = 2; }));
  all.push_back(recomputed(step_case("fsdp_tp", {.dp = 3, .tp = 2}, Dtype::kBFloat16), 0.1));
  // Sequence shards are gathered again, too.
  all.push_back(
      with(recomputed(step_case("megatron", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2"), 0.1),
           [](Case& c) { c.settings.sequence_parallel = true; }));
  all.push_back(
      with(recomputed(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "gpt2"), 0.1),
           [](Case& c) { c.settings.autocast = Dtype::kBFloat16; }));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Meshes, RecomputedStep, ::testing::ValuesIn(recompute_cases()), case_name);

// The emulator does not recompute.
TEST_P(RecomputedStep, IsBitEqualToTheEmulatedRunThatKeepsEverything) {
  const Case& item = GetParam();
  const EmulatedAndActual both = run_beside_its_emulation(item);

  EXPECT_EQ(equality_of(both.emulated, both.actual).difference, "");
  const bool drops = item.config.attention_dropout > 0;
  const std::int64_t per_pass = !drops ? 0 : item.config.residual_dropout > 0 ? 6 : 2;
  EXPECT_EQ(num_second_masks(both.actual),
            per_pass * item.world_size() * item.micro_batches * item.steps);
}

TEST(RecomputedStepOfOne, IsBitEqualToThePlainReference) {
  for (const char* subject : {"ddp", "autotp", "reference"}) {
    const Case item = recomputed(step_case(subject, {}, Dtype::kBFloat16, "gpt2"), 0.3);
    const Reference& reference = reference_of(item);

    EXPECT_TRUE(is_bit_equal(reference, run_case(item, reference))) << subject;
  }
}

// Of 2 layers with 2 row layers each: every sum of the forward pass is made again in backward, in
// the same order on all ranks (the communicator compares what ranks come with).
TEST(RecomputedStepCollectives, RepeatTheSumsOfTheForwardPass) {
  const auto counted = [](bool recompute) {
    Case item = step_case("autotp", {.dp = 2, .tp = 3});
    item.settings.recompute_every = recompute ? 1 : 0;
    return run_world(6, [item](Rank& rank) {
      EXPECT_EQ(rank.size(), 6);
      const auto counts = std::make_shared<CallCounts>();
      CountedRank counting(rank, counts);
      const std::unique_ptr<Subject> subject = make_subject(item, counting, nullptr);
      subject->setup();
      subject->train_step(batches_of(item, CaseData(item), rank.rank(), 0));
      return std::vector<std::int64_t>{count_of(*counts, Purpose::kRowParallelForward),
                                       count_of(*counts, Purpose::kColumnParallelBackward),
                                       count_of(*counts, Purpose::kGradReduce)};
    });
  };

  EXPECT_THAT(counted(false), ::testing::Each(::testing::ElementsAre(4, 10, 1)));
  EXPECT_THAT(counted(true), ::testing::Each(::testing::ElementsAre(8, 10, 1)));
}

}  // namespace
}  // namespace isoshard
