// SPDX-License-Identifier: Apache-2.0
// Dropout in sharded runs: the masks and the numbers of the unsharded one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include <memory>
#include <string>
#include <vector>

#include "harness/judge/judge.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/train/trainer.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

Case with_dropout(Case item, double rate = 0.1) {
  set_dropout(item.config, rate);
  return item;
}

std::int64_t num_masks(const Trace& trace) {
  std::int64_t count = 0;
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) count += record.key.kind == RecordKind::kMask ? 1 : 0;
  }
  return count;
}

class DropoutStep : public ::testing::TestWithParam<Case> {};

std::vector<Case> dropout_cases() {
  std::vector<Case> all;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    all.push_back(with_dropout(step_case("ddp", {.dp = 3}, dtype, "gpt2")));
    all.push_back(with_dropout(step_case("autotp", {.dp = 3, .tp = 2}, dtype, "gpt2")));
    all.push_back(with_dropout(step_case("autotp", {.dp = 3, .tp = 2}, dtype)));
    all.push_back(with_dropout(step_case("autotp", {.dp = 2, .tp = 3}, dtype, "megatron_gpt")));
    all.push_back(with(with_dropout(step_case("autotp", {.dp = 3, .tp = 2}, dtype, "gpt2"), 0.5),
                       [](Case& c) {
                         c.micro_batches = 2;
                         c.batch_size = 1;
                         c.seq_length = 13;
                         c.steps = 2;
                         c.data.unequal_labels = true;
                       }));
  }
  // a kv head that three ranks hold
  all.push_back(with_dropout(with_heads(step_case("autotp", {.dp = 2, .tp = 3}), 6, 1)));
  all.push_back(with(with_dropout(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2")),
                     [](Case& c) { c.settings.autocast = Dtype::kBFloat16; }));
  all.push_back(with_dropout(step_case("fsdp_tp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2")));
  all.push_back(
      with(with_dropout(step_case("megatron", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2")),
           [](Case& c) { c.settings.sequence_parallel = true; }));
  all.push_back(with(with_dropout(step_case("autotp", {.dp = 2, .tp = 3})), [](Case& c) {
    c.mesh_order = {Axis::kTp, Axis::kDp};
  }));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Meshes, DropoutStep, ::testing::ValuesIn(dropout_cases()), case_name);

// Each rank's masks are its parts of the ones that a single process draws for the global batch:
// compared bit by bit, part by part.
TEST_P(DropoutStep, HasTheMasksAndTheNumbersOfTheUnshardedRun) {
  const Case& item = GetParam();
  const Reference& reference = reference_of(item);

  const Trace actual = run_case(item, reference);

  ASSERT_EQ(static_cast<int>(actual.ranks.size()), item.degrees.dp * item.degrees.tp);
  EXPECT_THAT(actual, conforms_to(reference, policy_of(item)));
  const std::int64_t per_pass = item.config.model_type == "qwen2" ? 2 : 7;
  EXPECT_EQ(num_masks(actual), per_pass * item.world_size() * item.micro_batches * item.steps);
  EXPECT_EQ(num_masks(reference.trace()), per_pass * item.micro_batches * item.steps);
}

class DropoutStepEmulated : public ::testing::TestWithParam<Case> {};

TEST_P(DropoutStepEmulated, IsBitEqualToItsEmulatedReference) {
  expect_bit_equal_to_the_subject(GetParam());
}

// All but tp as the slow axis, of which nobody declares an arithmetic.
std::vector<Case> declared_cases() {
  std::vector<Case> declared = dropout_cases();
  const auto is_undeclared = [](const Case& item) { return !declares_numerics(item); };
  EXPECT_EQ(std::count_if(declared.begin(), declared.end(), is_undeclared), 1);
  std::erase_if(declared, is_undeclared);
  return declared;
}

INSTANTIATE_TEST_SUITE_P(Meshes, DropoutStepEmulated, ::testing::ValuesIn(declared_cases()),
                         case_name);

TEST(DropoutStepOfOne, IsBitEqualToThePlainReference) {
  for (const char* subject : {"ddp", "autotp"}) {
    const Case item = with_dropout(step_case(subject, {}, Dtype::kBFloat16, "gpt2"), 0.3);
    const Reference& reference = reference_of(item);

    EXPECT_TRUE(is_bit_equal(reference, run_case(item, reference))) << subject;
  }
}

// Head numbers of the rank instead of the model's, as a stream that starts anew on every rank draws
// them.
class LocalIndices final : public RngStreams {
 public:
  using RngStreams::RngStreams;
  at::Tensor keep_mask(const MaskPart& part) const override {
    MaskPart local = part;
    for (std::int64_t& offset : local.offset) offset = 0;
    local.global_shape = local.size;
    return RngStreams::keep_mask(local);
  }
};

TEST(DropoutStepFaults, MasksByTheRanksOwnIndexAreSeenAsMasks) {
  const Case item = with_dropout(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2"));
  RunOptions options;
  options.edits.parts = [](TrainerParts& parts, Mesh&) {
    parts.streams = std::make_shared<LocalIndices>(parts.streams->seed());
  };

  const Verdict verdict =
      judge(reference_of(item), run_case(item, reference_of(item), options), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().stage, Stage::kMasks);
  EXPECT_EQ(verdict.findings.front().key.name, "transformer.drop");
}

TEST(DropoutStepFaults, ADropoutThatOneRankLeavesOutIsSeenAsAMissingMask) {
  const Case item = with_dropout(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2"));
  RunOptions options;
  options.edits.parts = [](TrainerParts& parts, Mesh& mesh) {
    if (mesh.rank() == 4) parts.streams = nullptr;
  };

  const Verdict verdict =
      judge(reference_of(item), run_case(item, reference_of(item), options), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().stage, Stage::kMasks);
  EXPECT_THAT(verdict.findings.front().ranks, ::testing::ElementsAre(4));
}

}  // namespace
}  // namespace isoshard
