// SPDX-License-Identifier: Apache-2.0
// Frozen weights: no gradient, no optimizer state, no part in the clip norm, no step, and backward
// that goes no further than to the first weight that is trained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "suite/testing/emulated_cases.h"
#include "suite/verify/verify_case.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

/// What is read first: backward ends in the second layer.
constexpr const char* kFirstHalf = R"(model\.(embed_tokens|layers\.0)\..*)";
/// Something of each layer: q, k and v, which one product makes.
constexpr const char* kAttention = R"(.*\.(q|k|v)_proj\..*)";

/// Two steps of two micro-batches, the rank's counts unequal, clipped.
Case frozen(Case item, const char* pattern = kFirstHalf) {
  item.settings.freeze = pattern;
  item.settings.optimizer = OptimizerSettings{};
  item.settings.optimizer.weight_decay = 0.1;
  item.settings.max_grad_norm = 0.1;
  item.settings.bucket_bytes = 1 << 13;
  item.data.unequal_labels = true;
  item.micro_batches = 2;
  item.steps = 2;
  return item;
}

std::vector<Case> frozen_cases() {
  const auto on_masters = [](Case item) { return with_masters(std::move(item), Dtype::kBFloat16); };
  const auto split_sequence = [](Case item) {
    item.settings.sequence_parallel = true;
    return split(std::move(item), 8);
  };
  const auto distributed = [](Case item) {
    item.settings.distributed_optimizer = true;
    return item;
  };
  return {
      frozen(step_case("ddp", {.dp = 3})),
      frozen(step_case("ddp", {.dp = 2}), kAttention),
      frozen(with_heads(step_case("autotp", {.dp = 2, .tp = 2}), 6, 1)),
      frozen(with_zero(1, on_masters(step_case("autotp", {.dp = 3, .tp = 2}))), kAttention),
      frozen(with_zero(2, split(step_case("autotp", {.dp = 2, .tp = 2}), 8))),
      frozen(step_case("fsdp_tp", {.dp = 3, .tp = 2})),
      frozen(on_masters(step_case("fsdp_tp", {.dp = 3})), kAttention),
      frozen(distributed(split_sequence(step_case("megatron", {.dp = 2, .tp = 2})))),
      frozen(distributed(on_masters(step_case("megatron", {.dp = 3, .tp = 2}))), kAttention),
      frozen(step_case("nd", {.pp = 2, .dp = 2}), R"(model\.(embed_tokens|layers\.0\.mlp)\..*)"),
      frozen(split_sequence(step_case("nd", {.cp = 2, .tp = 2}))),
      with(frozen(step_case("nd", {.dp = 4})), [](Case& c) { c.settings.nd.dp_replicate = 2; }),
  };
}

class FrozenStep : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Subjects, FrozenStep, ::testing::ValuesIn(frozen_cases()), case_name);

// Bit by bit against the declared arithmetic, within tolerances against the plain process, and with
// the calls that the table of calls says.
TEST_P(FrozenStep, ConformsToTheEmulatedAndToThePlainProcess) {
  const CaseJudgement judgement =
      CaseJudge({.reference = ReferenceKind::kBoth}).judge_case(GetParam());

  EXPECT_EQ(judgement.verdict.status, Status::kConforms) << judgement.verdict.reason;
  EXPECT_EQ(judgement.verdict.strength, Strength::kExact);
}

// The bug: frozen weights are trained.
TEST_P(FrozenStep, DivergesWhereFrozenWeightsAreTrained) {
  SubjectEdits edits;
  edits.parts = [](TrainerParts& parts, Mesh&) { parts.is_frozen = nullptr; };
  CaseJudge judge({.run = {.edits = edits}});

  const CaseJudgement judgement = judge.judge_case(GetParam());

  EXPECT_EQ(judgement.verdict.status, Status::kDiverges);
}

TEST(FrozenStepReference, HasNoGradientNoStateAndNoStepOfWhatIsFrozen) {
  const Case item = frozen(step_case("ddp", {.dp = 2}));
  const Reference& reference = reference_of(item);
  const std::string weight = "model.layers.0.mlp.up_proj.weight",
                    trained = "model.layers.1.mlp.up_proj.weight";
  const auto has = [&](int step, RecordKind kind, const std::string& name) {
    return reference.find({step, kind, name, 0}) != nullptr;
  };
  const auto parameter = [&](int step, const std::string& name, int call) {
    return tensor_of(reference.tensor({step, RecordKind::kParam, name, call}));
  };

  for (const int step : {0, 1}) {
    EXPECT_FALSE(has(step, RecordKind::kGrad, weight));
    EXPECT_FALSE(has(step, RecordKind::kGrad, weight + ".micro_batch"));
    EXPECT_FALSE(has(step, RecordKind::kOptimizer, weight + ".exp_avg"));
    EXPECT_TRUE(has(step, RecordKind::kGrad, trained));
    EXPECT_TRUE(has(step, RecordKind::kOptimizer, trained + ".exp_avg"));
  }
  EXPECT_TRUE(parameter(1, weight, 0).equal(parameter(0, weight, 0)));
  EXPECT_FALSE(parameter(1, trained, 0).equal(parameter(0, trained, 0)));
  EXPECT_TRUE(has(0, RecordKind::kActivationGrad, "model.layers.1.mlp.up_proj"));
  EXPECT_FALSE(has(0, RecordKind::kActivationGrad, "model.layers.0.mlp.up_proj"));
}

TEST(FrozenStepReference, LeavesFrozenWeightsOutOfTheClipNorm) {
  const auto squared_norm = [](const Reference& reference) {
    const double norm =
        tensor_of(reference.tensor({0, RecordKind::kScalar, "grad_norm", 0})).item<double>();
    return norm * norm;
  };
  const Case item = frozen(step_case("ddp", {.dp = 2}));
  Case whole = item;
  whole.settings.freeze.clear();

  const double of_trained = squared_norm(reference_of(item)),
               of_all = squared_norm(reference_of(whole));

  // Gradients of what is trained are the same: nothing has been stepped yet.
  double of_frozen = 0;
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    if (!frozen_by(kFirstHalf)(spec.name)) continue;
    const at::Tensor gradient =
        tensor_of(reference_of(whole).tensor({0, RecordKind::kGrad, spec.name, 0}));
    const double norm = gradient.norm().item<double>();
    of_frozen += norm * norm;
  }
  EXPECT_GT(of_frozen, 0.1 * of_all);
  EXPECT_NEAR(of_trained + of_frozen, of_all, 1e-5 * of_all);
}

TEST(FrozenStepRefusals, NameThePatternAndTheNumbers) {
  const auto problem = [](const Case& item) { return [item] { item.validate(); }; };

  EXPECT_THAT(problem(frozen(step_case("ddp", {.dp = 2}), "layers.0")),
              ThrowsMessage<UsageError>(HasSubstr("matches 0 of the 27")));
  EXPECT_THAT(problem(frozen(step_case("ddp", {.dp = 2}), ".*")),
              ThrowsMessage<UsageError>(HasSubstr("matches 27 of the 27")));
  EXPECT_THAT(problem(frozen(step_case("ddp", {.dp = 2}), "(")),
              ThrowsMessage<UsageError>(HasSubstr("--freeze must be a regular expression")));
  EXPECT_THAT(problem(with(frozen(step_case("ddp", {.dp = 2})),
                           [](Case& c) { c.settings.recompute_every = 1; })),
              ThrowsMessage<UsageError>(HasSubstr("to be trained with --recompute")));
  EXPECT_THAT(problem(frozen(step_case("nd", {.pp = 2}))),
              ThrowsMessage<UsageError>(HasSubstr("all of stage 0 are frozen")));
  EXPECT_THAT(
      [] {
        CaseJudge judge({.reference = ReferenceKind::kEmulated});
        (void)judge.judge_case(
            frozen(step_case("megatron", {.dp = 2, .tp = 2}), R"(.*\.q_proj\..*)"));
      },
      ThrowsMessage<UsageError>(HasSubstr("got 1 of the 3 of decoder.layers.0.self_attention")));
}

}  // namespace
}  // namespace isoshard
