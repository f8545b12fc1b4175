// SPDX-License-Identifier: Apache-2.0
// Training in fp16 with a scaled loss: steps whose gradients
// overflow are skipped by all ranks alike, and the scale follows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "harness/judge/judge.h"
#include "harness/testing/is_cause.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

using Kind = LossScaleSettings::Kind;
constexpr int kSteps = 4;

/// The first steps overflow whatever the sizes, the last does not: the scale is 2^45, 2^30, 2^15
/// and 1 if all of them do.
Case scaled(Case item) {
  item.settings.loss_scale = {Kind::kDynamic, 0x1p45, 2, 0x1p-15, 2000};
  item.steps = kSteps;
  return item;
}

Case with_masters(Case item) {
  return scaled(with_masters(std::move(item), Dtype::kFloat16));
}

Case under_autocast(Case item) {
  item.settings.autocast = Dtype::kFloat16;
  return scaled(std::move(item));
}

Case with_adamw(Case item) {
  item.settings.optimizer = OptimizerSettings{};
  return item;
}

double scalar(const Reference& reference, int step, const std::string& name) {
  return tensor_of(reference.tensor({step, RecordKind::kScalar, name, 0})).item<double>();
}

bool is_skipped(const Reference& reference, int step) {
  return scalar(reference, step, "found_inf") != 0;
}

class LossScaleStep : public ::testing::TestWithParam<Case> {};

std::vector<Case> loss_scale_cases() {
  const auto megatron = [](const Degrees& degrees, const char* type) {
    return with(step_case("megatron", degrees, Dtype::kFloat32, type), [](Case& c) {
      c.settings.sequence_parallel = true;
      c.settings.distributed_optimizer = true;
    });
  };
  return {with_masters(step_case("ddp", {.dp = 3})),
          under_autocast(with_adamw(step_case("ddp", {.dp = 3}, Dtype::kFloat32, "gpt2"))),
          with_masters(step_case("autotp", {.dp = 3, .tp = 2})),
          under_autocast(step_case("autotp", {.dp = 3, .tp = 2})),
          with_masters(with_adamw(with_zero(1, step_case("autotp", {.dp = 3, .tp = 2})))),
          under_autocast(
              with_zero(1, step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kFloat32, "llama"))),
          with_masters(with_zero(2, step_case("autotp", {.dp = 3, .tp = 2}))),
          with(with_masters(
                   with_adamw(with_zero(2, split(step_case("autotp", {.dp = 3, .tp = 2}), 1)))),
               [](Case& c) { c.micro_batches = 2; }),
          with_masters(with_adamw(step_case("fsdp_tp", {.dp = 3, .tp = 2}))),
          under_autocast(step_case("fsdp_tp", {.dp = 3, .tp = 2})),
          with_masters(with_adamw(megatron({.dp = 3, .tp = 2}, "qwen2"))),
          with_masters(step_case("megatron", {.dp = 2, .tp = 2})),
          under_autocast(megatron({.dp = 2, .tp = 2}, "llama")),
          in_order(ReductionOrder::kRing, with_masters(step_case("autotp", {.dp = 3, .tp = 2}))),
          with(with_masters(step_case("autotp", {.dp = 3, .tp = 2})),
               [](Case& c) {  // grows after every step
                 c.settings.loss_scale = {Kind::kDynamic, 16, 4, 0.5, 1};
               }),
          with(with_masters(split(step_case("autotp", {.dp = 3, .tp = 2}), 1)), [](Case& c) {
            c.settings.loss_scale = {Kind::kStatic, 1000};
          })};
}

INSTANTIATE_TEST_SUITE_P(Subjects, LossScaleStep, ::testing::ValuesIn(loss_scale_cases()),
                         case_name);

// What overflows is infinite, or not a number, at the same places; which NaN it is, is any.
TEST_P(LossScaleStep, IsBitEqualToItsEmulatedReference) {
  (void)run_bit_equal_to_its_emulation(GetParam());
}

// A skipped step leaves everything but the scale; the next one that is made is the first one of the
// optimizer.
TEST_P(LossScaleStep, SkipsWhatOverflowsAndFollowsTheRule) {
  const Case& item = GetParam();
  const Reference reference = make_emulated_reference(item, numerics_of(item));
  LossScale scale(item.settings.loss_scale);
  const std::string name =
      item.config.model_type == "gpt2" ? "transformer.ln_f.weight" : "model.norm.weight";
  // Of what is stepped: an update may round away in fp16.
  const bool has_masters = item.settings.master_dtype.has_value();
  at::Tensor before = tensor_of(reference.tensor({0, RecordKind::kParam, name, 0})).to(at::kFloat);
  bool has_stepped = false;

  for (int step = 0; step < item.steps; ++step) {
    EXPECT_EQ(scalar(reference, step, "loss_scale"), scale.value()) << step;
    const bool skipped = is_skipped(reference, step);
    has_stepped = has_stepped || !skipped;
    const RecordKey stepped = has_masters
                                  ? RecordKey{step, RecordKind::kOptimizer, name + ".master", 0}
                                  : RecordKey{step, RecordKind::kParam, name, step == 0 ? 1 : 0};
    const at::Tensor after = tensor_of(reference.tensor(stepped));
    EXPECT_EQ(after.equal(before), skipped) << step;
    EXPECT_EQ(reference.find({step, RecordKind::kOptimizer,
                              name + (item.settings.optimizer.kind == OptimizerSettings::Kind::kSgd
                                          ? ".momentum_buffer"
                                          : ".exp_avg"),
                              0}) != nullptr,
              has_stepped)
        << step;
    scale.update(skipped);
    before = after;
  }

  const bool overflows = item.settings.loss_scale.initial > 0x1p40;
  EXPECT_EQ(is_skipped(reference, 0), overflows);
  EXPECT_FALSE(is_skipped(reference, item.steps - 1)) << "no step was made";
}

// A scale changes nothing but what rounds to zero without it: judged against the plain process, as
// any step.
TEST(LossScaleStep, ConformsToThePlainProcess) {
  // One kv head on two tp ranks: gradients behind its copies are recorded as summands.
  for (Case item : {with_masters(step_case("autotp", {.dp = 3, .tp = 2})),
                    under_autocast(step_case("ddp", {.dp = 3})),
                    with_masters(with_heads(step_case("autotp", {.dp = 2, .tp = 2}), 6, 1)),
                    with_masters(with_heads(step_case("fsdp_tp", {.dp = 3, .tp = 2}), 6, 1))}) {
    item.settings.loss_scale = {Kind::kDynamic, 1024, 2, 0.5, 2};
    const Reference& reference = reference_of(item);

    const Verdict verdict = judge(reference, run_case(item, reference), policy_of(item));

    EXPECT_EQ(verdict.status, Status::kConforms) << item.slug() << ": " << verdict.reason;
    EXPECT_EQ(verdict.skipped, 0);
    EXPECT_EQ(scalar(reference, 3, "loss_scale"), 2048) << "the scale grew after two steps";
  }
}

// Steps that all skip say something, too: what is read, drawn, lost and kept is judged, and
// gradients are not.
TEST(LossScaleStep, SkippedStepsAreJudgedWithoutTheirGradients) {
  Case item = with_masters(step_case("autotp", {.dp = 3, .tp = 2}));
  item.steps = 2;
  const Reference& reference = reference_of(item);

  const Verdict verdict = judge(reference, run_case(item, reference), policy_of(item));

  ASSERT_TRUE(is_skipped(reference, 0) && is_skipped(reference, 1));
  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_GT(verdict.skipped, 50);
  EXPECT_GT(verdict.compared, 100);
}

/// As if the gradients of one rank only had overflowed.
class OneRankOverflows : public GradScaler {
 public:
  OneRankOverflows(const LossScaleSettings& settings, Mesh& mesh)
      : GradScaler(settings, mesh.world()), rank_(mesh.rank()) {}
  bool found_on_any_rank(bool own) override {
    return GradScaler::found_on_any_rank(own || rank_ == 1);
  }

 protected:
  int rank_;
};

/// The bug: the flag is not shared.
class FlagOfOwnRank final : public OneRankOverflows {
 public:
  using OneRankOverflows::OneRankOverflows;
  bool found_on_any_rank(bool own) override { return own || rank_ == 1; }
};

template <class Scaler>
RunOptions with_scaler(const Case& item) {
  RunOptions options;
  options.edits.parts = [settings = item.settings.loss_scale](TrainerParts& parts, Mesh& mesh) {
    parts.grad_scaler = std::make_unique<Scaler>(settings, mesh);
  };
  return options;
}

Case quiet_case() {
  Case item = with_masters(step_case("autotp", {.dp = 3, .tp = 2}));
  item.settings.loss_scale = {Kind::kDynamic, 1024, 2, 0.5, 2000};
  item.steps = 2;
  return item;
}

TEST(LossScaleStepFaults, AnInfinityOnOneRankIsSkippedByAll) {
  const Case item = quiet_case();
  const Reference& reference = reference_of(item);

  RunOptions options = with_scaler<OneRankOverflows>(item);
  options.keep = Keep::kEverything;
  const Trace actual = run_case(item, reference, options);

  ASSERT_EQ(actual.ranks.size(), 6U);
  for (const RankTrace& rank : actual.ranks) {
    const auto value = [&](int step, const char* name) {
      return tensor_of(rank.tensor(*rank.find({step, RecordKind::kScalar, name, 0})))
          .item<double>();
    };
    EXPECT_EQ(value(0, "found_inf"), 1) << rank.rank;
    EXPECT_EQ(value(1, "loss_scale"), 512) << rank.rank;
    const RecordKey read{0, RecordKind::kParam, "model.norm.weight", 0},
        after{0, RecordKind::kParam, "model.norm.weight", 1};
    EXPECT_EQ(rank.find(read)->parts[0].digest, rank.find(after)->parts[0].digest) << rank.rank;
  }
  const Verdict verdict = judge(reference, actual, policy_of(item));
  ASSERT_EQ(verdict.status, Status::kDiverges) << "the reference skips nothing";
  EXPECT_EQ(verdict.findings.front().key.name, "found_inf");
}

TEST(LossScaleStepFaults, AFlagOfTheOwnRankPartsTheRanks) {
  const Case item = quiet_case();
  const Reference& reference = reference_of(item);

  const Verdict verdict = judge(
      reference, run_case(item, reference, with_scaler<FlagOfOwnRank>(item)), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  const Finding& first = verdict.findings.front();
  EXPECT_EQ(first.key.name, "found_inf");
  EXPECT_EQ(first.key.step, 0);
  EXPECT_THAT(first.ranks, testing::ElementsAre(1));
  EXPECT_THAT(first.what, testing::HasSubstr("copies differ"));
}

TEST(LossScaleStepFaults, AScaleThatIsNotTheDeclaredOneIsSeenFirst) {
  const Case item = quiet_case();
  const Reference& reference = reference_of(item);
  RunOptions options;
  options.edits.parts = [](TrainerParts& parts, Mesh& mesh) {
    parts.grad_scaler =
        std::make_unique<GradScaler>(LossScaleSettings{Kind::kStatic, 4096}, mesh.world());
  };

  const Verdict verdict = judge(reference, run_case(item, reference, options), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.front().stage, Stage::kStepSettings);
  EXPECT_EQ(verdict.findings.front().key.name, "loss_scale");
}

TEST(LossScaleStepFaults, ALossThatIsNotScaledIsSeenAtTheFirstGradient) {
  const Case item = quiet_case();
  const Reference& reference = reference_of(item);
  RunOptions options;
  options.mutation = [](int) -> TapMutation {
    return [](const Site& site, at::Tensor value) {
      return site.kind == RecordKind::kActivationGrad && site.name == "lm_head" ? value.div(1024)
                                                                                : value;
    };
  };

  const Verdict verdict = judge(reference, run_case(item, reference, options), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.front().stage, Stage::kActivationGrad);
  EXPECT_THAT(verdict.findings.front().cause,
              IsCause(CauseId::kScaleOfFormula, {{"formula", "2^-10"}}));
}

TEST(LossScaleStepFaults, ScalesOfWhatIsNotFp16AreRefused) {
  Case item = step_case("ddp", {.dp = 3});
  item.settings.loss_scale.kind = Kind::kDynamic;

  EXPECT_THROW(item.validate(), UsageError);
  item.dtype = Dtype::kFloat16;
  EXPECT_THROW(item.validate(), UsageError) << "gradients in fp16 are not unscaled";
  item.settings.master_dtype = Dtype::kFloat32;
  EXPECT_NO_THROW(item.validate());
  item.settings.loss_scale.initial = 0;
  EXPECT_THROW(item.validate(), UsageError);
}

}  // namespace
}  // namespace isoshard
