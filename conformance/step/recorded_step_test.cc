// SPDX-License-Identifier: Apache-2.0
// What only one of the records of a step shows: each fault here leaves everything before that
// record right.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "harness/judge/judge.h"
#include "harness/testing/is_cause.h"
#include "subjects/data/sampler.h"
#include "subjects/optim/wrapped_optimizer.h"
#include "subjects/parallel/wrapped_data_parallel.h"
#include "suite/emulation/emulated_reference.h"
#include "suite/record/expected_calls.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

Case two_steps(std::string subject, const Degrees& degrees) {
  Case item = step_case(std::move(subject), degrees);
  item.steps = 2;
  return item;
}

Verdict verdict_of(const Case& item, const RunOptions& options) {
  const Reference& reference = reference_of(item);
  const Trace run = run_case(item, reference, options);
  EXPECT_EQ(static_cast<int>(run.ranks.size()), item.world_size());
  return judge(reference, run, with_collectives(policy_of(item), item));
}

/// Against the emulation, where the reference has no such record or no response to it.
Verdict exact_verdict_of(const Case& item, const RunOptions& options) {
  const Reference reference = make_emulated_reference(item, numerics_of(item));
  return judge(reference, run_case(item, reference, options),
               with_collectives(exact_policy_of(item), item));
}

RunOptions with_parts(std::function<void(TrainerParts&, Mesh&)> edit) {
  RunOptions options;
  options.edits.parts = std::move(edit);
  return options;
}

void expect_first(const Verdict& verdict, const std::string& name, Stage stage, int step) {
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  const Finding& first = verdict.findings.front();
  EXPECT_EQ(first.key.name, name) << verdict.reason;
  EXPECT_EQ(first.stage, stage) << verdict.reason;
  EXPECT_EQ(first.key.step, step) << verdict.reason;
}

TEST(RecordedStep, OfEverySubjectConforms) {
  for (const char* const subject : {"autotp", "fsdp_tp", "megatron"}) {
    for (const bool recompute : {false, true}) {
      Case item = two_steps(subject, {.dp = 2, .tp = 2});
      item.settings.recompute_every = recompute ? 1 : 0;
      item.micro_batches = 2;
      const Verdict plain = verdict_of(item, {});
      EXPECT_EQ(plain.status, Status::kConforms) << plain.reason;
      const Verdict exact = exact_verdict_of(item, {});
      EXPECT_EQ(exact.status, Status::kConforms) << exact.reason;
    }
  }
}

/// Backward is of another loss than the one that is reported.
class OtherLoss final : public Strategy {
 public:
  using Strategy::Strategy;
  CrossEntropy loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                    const at::Tensor& weight_B, double label_smoothing) const override {
    CrossEntropy right = Strategy::loss(logits, targets_BS, weight_B, label_smoothing);
    right.loss = right.loss * 1.01;
    return right;
  }
};

TEST(RecordedStep, ShowsTheValueThatBackwardStartsFrom) {
  const Case item = step_case("ddp", {.dp = 3});

  const Verdict verdict = verdict_of(item, with_parts([](TrainerParts& parts, Mesh&) {
                                       parts.strategy = std::make_shared<OtherLoss>(3, 3);
                                     }));

  expect_first(verdict, "loss_backward", Stage::kForward, 0);
}

/// Gives the right norm, and leaves one gradient otherwise than it was recorded.
class SpoilingNorm final : public GradNorm {
 public:
  SpoilingNorm(std::unique_ptr<GradNorm> inner, std::string name)
      : inner_(std::move(inner)), name_(std::move(name)) {}
  double norm(const NamedTensors& gradients) override {
    const double norm = inner_->norm(gradients);
    at::Tensor spoiled = gradients.at(name_);
    spoiled.mul_(0.5);
    return norm;
  }

 private:
  std::unique_ptr<GradNorm> inner_;
  std::string name_;
};

TEST(RecordedStep, ShowsTheGradientsThatAreSteppedWith) {
  for (const char* const subject : {"ddp", "fsdp_tp"}) {
    const Case item = step_case(subject, {.dp = 2});

    const Verdict verdict = verdict_of(item, with_parts([](TrainerParts& parts, Mesh&) {
                                         parts.grad_norm = std::make_unique<SpoilingNorm>(
                                             std::move(parts.grad_norm), "model.norm.weight");
                                       }));

    expect_first(verdict, "model.norm.weight.clipped", Stage::kClippedGrad, 0);
  }
}

/// Doubles what the first micro-batch left, and halves it again before the second one adds to it.
class DoublingBetween final : public WrappedDataParallel {
 public:
  using WrappedDataParallel::WrappedDataParallel;
  void after_backward(bool reduces, bool is_last) override {
    inner().after_backward(reduces, is_last);
    if (!is_last) multiply(2);
    is_doubled_ = !is_last;
  }
  void before_backward(bool reduces) override {
    if (is_doubled_) multiply(0.5);
    inner().before_backward(reduces);
  }

 private:
  void multiply(double factor) {
    for (const auto& [name, parameter] : inner().held()) parameter.mutable_grad().mul_(factor);
  }

  bool is_doubled_ = false;
};

TEST(RecordedStep, ShowsGradientsBetweenMicroBatches) {
  for (const int zero_stage : {0, 1}) {
    Case item = step_case("autotp", {.dp = 2});
    item.settings.zero_stage = zero_stage;
    item.micro_batches = 2;
    const RunOptions doubled = with_parts([](TrainerParts& parts, Mesh&) {
      parts.data_parallel = std::make_unique<DoublingBetween>(std::move(parts.data_parallel));
    });

    for (const Verdict& verdict : {verdict_of(item, doubled), exact_verdict_of(item, doubled)}) {
      expect_first(verdict, "model.embed_tokens.weight.micro_batch", Stage::kParameterGrad, 0);
      if (HasFatalFailure()) return;
      EXPECT_EQ(verdict.findings.front().key.call, 0);
      EXPECT_THAT(verdict.reason,
                  HasSubstr("wrong after micro-batch 0, right at the end of the step"));
      for (const Finding& finding : verdict.findings)
        EXPECT_TRUE(role_of(finding.key) == NameRole::kMicroBatch) << finding.what;
    }
  }
}

/// Loses what the second of three micro-batches adds, from there on.
class LosingSecond final : public WrappedDataParallel {
 public:
  using WrappedDataParallel::WrappedDataParallel;
  void after_backward(bool reduces, bool is_last) override {
    inner().after_backward(reduces, is_last);
    const NamedTensors now = inner().accumulated().gradients;
    if (++num_backwards_ == 2) {
      for (const auto& [name, gradient] : now) at::Tensor(gradient).copy_(first_.at(name));
    }
    for (const auto& [name, gradient] : now) first_[name] = gradient.clone();
  }

 private:
  int num_backwards_ = 0;
  NamedTensors first_;
};

// Also of gradients that are reduced already, pieces of them, and main gradients.
TEST(RecordedStep, NamesTheMicroBatchWhoseGradientsAreLost) {
  for (const char* const subject : {"ddp", "fsdp_tp", "megatron"}) {
    Case item = step_case(subject, {.dp = 2});
    item.micro_batches = 3;

    const Verdict verdict = verdict_of(
        item, with_parts([](TrainerParts& parts, Mesh&) {
          parts.data_parallel = std::make_unique<LosingSecond>(std::move(parts.data_parallel));
        }));

    expect_first(verdict, "model.embed_tokens.weight.micro_batch", Stage::kParameterGrad, 0);
    if (HasFatalFailure()) return;
    EXPECT_EQ(verdict.findings.front().key.call, 1) << subject;
    EXPECT_THAT(verdict.findings.front().cause,
                IsCause(CauseId::kMicroBatchMissing, {{"missing", std::vector{1}}}))
        << subject;
  }
}

struct Accumulating {
  std::string subject;
  std::function<void(Case&)> change = [](Case&) {};
  bool is_reduced = false;  ///< after each micro-batch
};

TEST(RecordedStep, HasGradientsAfterEachMicroBatchButTheLast) {
  const std::vector<Accumulating> all = {
      {"autotp"},
      {"autotp", [](Case& c) { c.settings.zero_stage = 1; }},
      {"autotp", [](Case& c) { c.settings.zero_stage = 2; }, true},
      {"autotp",
       [](Case& c) {
         c.settings.autocast = Dtype::kFloat16;
         c.settings.loss_scale = {LossScaleSettings::Kind::kStatic, 1000};
       }},
      {"fsdp_tp", [](Case&) {}, true},
      {"megatron", [](Case& c) { c.settings.sequence_parallel = true; }},
      {"megatron", [](Case& c) { c.settings.distributed_optimizer = true; }}};
  for (const Accumulating& one : all) {
    Case item = step_case(one.subject, {.dp = 2, .tp = 2}, Dtype::kFloat32, "qwen3");
    item.micro_batches = 3;
    one.change(item);

    const Reference reference = make_emulated_reference(item, numerics_of(item));
    const Trace run = run_case(item, reference);
    const Verdict plain = verdict_of(item, {}),
                  exact = judge(reference, run, exact_policy_of(item));

    EXPECT_EQ(plain.status, Status::kConforms) << item.slug() << ": " << plain.reason;
    EXPECT_EQ(exact.status, Status::kConforms) << item.slug() << ": " << exact.reason;
    EXPECT_TRUE(plain.not_recorded.empty()) << item.slug();
    for (const RankTrace& rank : run.ranks) {
      int between = 0, gradients = 0;
      for (const Record& record : rank.records) {
        if (record.key.kind != RecordKind::kGrad || role_of(record.key) == NameRole::kClipped)
          continue;
        if (role_of(record.key) != NameRole::kMicroBatch) {
          ++gradients;
          EXPECT_FALSE(is_partial(record.layout)) << describe(record.key);
          continue;
        }
        ++between;
        EXPECT_LT(record.key.call, 2);
        const std::vector<Placement>& placements = record.layout.placements;
        EXPECT_EQ(std::ranges::count(placements, partial(Axis::kDp, Reduction::kAvg)),
                  one.is_reduced ? 0 : 1)
            << describe(record.key);
      }
      EXPECT_EQ(between, 2 * gradients) << item.slug();
      EXPECT_GE(gradients, 20);
    }
  }
}

TEST(RecordedStep, NeedNotShowGradientsBetweenMicroBatchesButThenNone) {
  Case item = step_case("ddp", {.dp = 2});
  item.micro_batches = 3;
  const Reference& reference = reference_of(item);
  const auto without = [&](const std::function<bool(const RecordKey& key)>& leaves_out) {
    Trace run = run_case(item, reference);
    for (RankTrace& rank : run.ranks)
      std::erase_if(rank.records, [&](const Record& r) { return leaves_out(r.key); });
    return judge(reference, run, policy_of(item));
  };

  const Verdict none =
      without([](const RecordKey& key) { return role_of(key) == NameRole::kMicroBatch; });
  const Verdict one = without([](const RecordKey& key) {
    return key.name == "model.norm.weight.micro_batch" && key.call == 1;
  });

  EXPECT_EQ(none.status, Status::kConforms) << none.reason;
  EXPECT_THAT(none.not_recorded, testing::Contains(HasSubstr("model.norm.weight.micro_batch")));
  expect_first(one, "model.norm.weight.micro_batch", Stage::kParameterGrad, 0);
  EXPECT_THAT(one.reason, HasSubstr("was recorded by no rank"));
}

/// Counts one update more than it makes.
class MiscountingOptimizer final : public WrappedOptimizer {
 public:
  using WrappedOptimizer::WrappedOptimizer;
  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    inner().step(parameters, gradients);
  }
  [[nodiscard]] UpdateCounts updates() const override {
    UpdateCounts counts = WrappedOptimizer::updates();
    ++counts.begin()->second;
    return counts;
  }
};

TEST(RecordedStep, ShowsTheOptimizersCountOfSteps) {
  Case item = step_case("ddp", {.dp = 2});
  item.settings.optimizer = OptimizerSettings{};

  const Verdict verdict = verdict_of(
      item, with_parts([](TrainerParts& parts, Mesh&) {
        parts.optimizer = std::make_unique<MiscountingOptimizer>(std::move(parts.optimizer));
      }));

  expect_first(verdict, "optimizer_steps", Stage::kProgress, 0);
}

TEST(RecordedStep, ShowsTheStateOfTheMasks) {
  const Case item = step_case("ddp", {.dp = 2});  // has no dropout: no mask shows it

  const Verdict verdict = verdict_of(item, with_parts([](TrainerParts& parts, Mesh&) {
                                       parts.streams =
                                           std::make_shared<RngStreams>(parts.streams->seed() + 1);
                                     }));

  expect_first(verdict, "rng_state", Stage::kProgress, 0);
}

/// Right in the steps of the run, wrong in the one behind them.
class LaterSampler final : public Sampler {
 public:
  LaterSampler(std::shared_ptr<const Sampler> inner, std::int64_t right)
      : inner_(std::move(inner)), right_(right) {}
  std::vector<std::int64_t> samples(std::int64_t global_batch, int dp_coordinate) const override {
    return inner_->samples(global_batch < right_ ? global_batch : 0, dp_coordinate);
  }

 private:
  std::shared_ptr<const Sampler> inner_;
  std::int64_t right_;
};

TEST(RecordedStep, ShowsWhereTheSamplerStands) {
  const Case item = step_case("ddp", {.dp = 2});
  RunOptions options;
  options.sampler = [](std::shared_ptr<const Sampler> inner, int) {
    return std::make_shared<LaterSampler>(std::move(inner), 1);
  };

  const Verdict verdict = verdict_of(item, options);

  expect_first(verdict, "next_sample_ids", Stage::kProgress, 0);
}

/// From the second step on forward reads a copy of one parameter that nobody stepped.
class StaleParameter final : public WrappedDataParallel {
 public:
  StaleParameter(std::unique_ptr<DataParallel> inner, std::string name)
      : WrappedDataParallel(std::move(inner)), name_(std::move(name)) {}
  const NamedTensors& before_forward() override {
    read_ = inner().before_forward();
    if (!stale_.defined()) stale_ = read_.at(name_).detach().clone();
    if (is_later_) read_[name_] = stale_;
    return read_;
  }
  void publish() override {
    inner().publish();
    is_later_ = true;
  }

 private:
  std::string name_;
  NamedTensors read_;
  at::Tensor stale_;
  bool is_later_ = false;
};

TEST(RecordedStep, ShowsTheParametersThatForwardReadsLater) {
  // a rate at which stale weights are within the tolerance of the forward pass
  Case item = two_steps("ddp", {.dp = 2});
  item.settings.optimizer.learning_rate = 1e-6;

  const Verdict verdict =
      verdict_of(item, with_parts([](TrainerParts& parts, Mesh&) {
                   parts.data_parallel = std::make_unique<StaleParameter>(
                       std::move(parts.data_parallel), "model.embed_tokens.weight");
                 }));

  expect_first(verdict, "model.embed_tokens.weight.read", Stage::kParametersRead, 1);
}

/// Gives slightly other outputs when a layer is computed again.
class ForgetfulStrategy final : public Strategy {
 public:
  using Strategy::Strategy;
  at::Tensor linear(std::string_view module, const at::Tensor& x, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias, Sink* sink) const override {
    at::Tensor y = Strategy::linear(module, x, weight, bias, sink);
    const bool is_second = ++calls_[std::string(module)] % 2 == 0;
    return is_second && module.ends_with("layers.1.mlp.up_proj") ? y * (1 + 1e-6) : y;
  }

 private:
  mutable std::map<std::string, int> calls_;
};

TEST(RecordedStep, ShowsActivationsThatAreComputedAgain) {
  Case item = step_case("ddp", {.dp = 2});
  item.settings.recompute_every = 1;

  const Verdict verdict = verdict_of(item, with_parts([](TrainerParts& parts, Mesh&) {
                                       parts.strategy = std::make_shared<ForgetfulStrategy>(2, 2);
                                     }));

  expect_first(verdict, "model.layers.1.mlp.up_proj.recomputed", Stage::kForward, 0);
}

}  // namespace
}  // namespace isoshard
