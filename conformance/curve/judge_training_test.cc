// SPDX-License-Identifier: Apache-2.0
// Whole training runs: right ones stay within what is allowed of a curve, wrong ones do not.
#include "suite/train/judge_training.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "fixtures/cases/setting.h"
#include "subjects/optim/optimizer.h"
#include "subjects/registry/subject_spec.h"
#include "suite/faults/fault.h"
#include "suite/faults/test_doubles.h"
#include "suite/record/make_subject.h"
#include "suite/reference/perturbed_weights.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

constexpr int kSteps = 24;
using Kind = OptimizerSettings::Kind;

Case tiny(const std::string& subject, Kind optimizer, Dtype dtype, int tp = 2, int dp = 2) {
  Case item = tiny_fault_case();
  item.subject = subject;
  item.degrees.tp = subject == "ddp" ? 1 : tp;
  item.degrees.dp = dp;
  item.dtype = dtype;
  item.steps = kSteps;
  if (optimizer == Kind::kAdamW) item.settings.optimizer = OptimizerSettings{};
  // it has no others
  if (subject == "megatron" && dtype == Dtype::kBFloat16)
    item.settings.master_dtype = Dtype::kFloat32;
  return item;
}

/// Made once for all subjects of a case.
const TrainedCase& reference_of_training(const Case& item) {
  static std::map<std::string, TrainedCase> known;
  const std::string slug = item.reference_slug();
  const auto found = known.find(slug);
  return found != known.end() ? found->second
                              : known.emplace(slug, train_reference(item)).first->second;
}

CurveVerdict trained_and_judged(const Case& item, const TrainOptions& options = {}) {
  return judge_training(reference_of_training(item).curve, train_case(item, options));
}

struct Setting {
  std::string name;
  Kind optimizer;
  Dtype dtype;
};
class TrainingCurves : public testing::TestWithParam<Setting> {
 protected:
  static void expect_within_the_envelope();
};
class TrainingCurvesWide : public TrainingCurves {};

void TrainingCurves::expect_within_the_envelope() {
  const auto& [name, optimizer, dtype] = GetParam();
  int judged = 0;
  for (const SubjectSpec& subject : subject_specs()) {
    if (subject.is_reference()) continue;
    const Case item = tiny(std::string(subject.name), optimizer, dtype);
    ASSERT_EQ(item.world_size(), subject.name == "ddp" ? 2 : 4);

    const CurveVerdict verdict = trained_and_judged(item);

    EXPECT_EQ(verdict.status, Status::kConforms) << render(verdict);
    EXPECT_EQ(verdict.steps, kSteps);
    EXPECT_LE(verdict.largest_share, 1) << verdict.label;
    RecordProperty(std::string(subject.name) + "_share", std::to_string(verdict.largest_share));
    ++judged;
  }
  EXPECT_EQ(judged, 5);
}

TEST_P(TrainingCurves, OfEverySubjectStayWithinTheEnvelope) {
  expect_within_the_envelope();
}
TEST_P(TrainingCurvesWide, OfEverySubjectStayWithinTheEnvelope) {
  expect_within_the_envelope();
}

const auto name_of_setting = [](const auto& setting) { return setting.param.name; };
INSTANTIATE_TEST_SUITE_P(, TrainingCurves,
                         testing::Values(Setting{"adamw_fp32", Kind::kAdamW, Dtype::kFloat32},
                                         Setting{"sgd_bf16", Kind::kSgd, Dtype::kBFloat16}),
                         name_of_setting);
INSTANTIATE_TEST_SUITE_P(, TrainingCurvesWide,
                         testing::Values(Setting{"sgd_fp32", Kind::kSgd, Dtype::kFloat32},
                                         Setting{"adamw_bf16", Kind::kAdamW, Dtype::kBFloat16}),
                         name_of_setting);

/// Takes `share` of one step: 0 drops it, 0.5 halves its learning rate.
TrainOptions one_step_off(int step, double share) {
  TrainOptions options;
  options.run.edits.parts = [=](TrainerParts& parts, Mesh&) {
    parts.optimizer = optimizer_double(
        std::move(parts.optimizer), [=, taken = 0](Optimizer& inner, NamedTensors& parameters,
                                                   const NamedTensors& gradients) mutable {
          NamedTensors before;
          const bool is_off = taken++ == step;
          if (is_off) {
            for (const auto& [name, parameter] : parameters)
              before[name] = parameter.detach().clone();
          }
          inner.step(parameters, gradients);
          if (!is_off) return;
          const at::NoGradGuard no_grad;
          for (auto& [name, parameter] : parameters)
            parameter.copy_(before[name] + share * (parameter - before[name]));
        });
  };
  return options;
}

TEST(TrainingCurveControl, AWrongLearningRateInOneStepIsSeenInTheNext) {
  for (const Kind optimizer : {Kind::kAdamW, Kind::kSgd}) {
    const CurveVerdict verdict =
        trained_and_judged(tiny("ddp", optimizer, Dtype::kFloat32), one_step_off(7, 0.9));

    EXPECT_EQ(verdict.status, Status::kDiverges);
    ASSERT_TRUE(verdict.first.has_value());
    EXPECT_EQ(verdict.first->step, 8) << render(verdict);
    EXPECT_EQ(verdict.first->number, "loss");
  }
}

// Where tolerances would let it pass.
TEST(TrainingCurveControl, ABrokenPublishedLimitDivergesAtThePublishedRate) {
  Case item = tiny("fsdp_tp", Kind::kAdamW, Dtype::kBFloat16);
  item.settings.optimizer.learning_rate = 1e-5;
  Curve reference = reference_of_training(item).curve;
  reference.spreads.assign(reference.steps.size(), {0.01, 0.01, 0.01});
  TrainedCase run = train_case(item);
  const CurveVerdict right = judge_training(reference, run);
  EXPECT_EQ(right.status, Status::kConforms) << render(right);
  EXPECT_THAT(right.published, SizeIs(3));

  for (CurveStep& step : run.curve.steps) {
    step.loss += 0.002;
    for (double& loss : step.rank_losses) loss += 0.002;
  }
  const CurveVerdict broken = judge_training(reference, run);
  EXPECT_EQ(broken.status, Status::kDiverges) << render(broken);
  EXPECT_THAT(broken.reason, AllOf(HasSubstr("initial loss 0.002 (below 0.001: BROKEN)"),
                                   HasSubstr("mean difference 0.002 (below 0.001: BROKEN)")));

  for (Curve* curve : {&reference, &run.curve}) {
    for (CurveStep& step : curve->steps) step.learning_rate = 2e-5;
  }
  EXPECT_EQ(judge_training(reference, run).status, Status::kConforms);
}

TEST(TrainingCurveControl, ADroppedStepIsSeenInTheNext) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    const CurveVerdict verdict =
        trained_and_judged(tiny("ddp", Kind::kSgd, dtype), one_step_off(7, 0));

    EXPECT_EQ(verdict.status, Status::kDiverges) << render(verdict);
    ASSERT_TRUE(verdict.first.has_value());
    EXPECT_GE(verdict.first->step, 8);
    if (dtype == Dtype::kFloat32) {
      EXPECT_EQ(verdict.first->step, 8);
    }
  }
}

/// The verdict on the fault's own case, trained.
CurveVerdict with_fault_trained(const char* id, Kind optimizer) {
  const Fault& fault = find_fault(id);
  Case item = fault.smallest_case();
  item.steps = 8;
  if (optimizer == Kind::kAdamW) item.settings.optimizer = OptimizerSettings{};
  const FaultProbe probe;
  TrainOptions options;
  options.run = with_fault(options.run, fault, item, probe);
  const TrainedCase reference = train_reference(item), trained = train_case(item, options);
  EXPECT_GT(probe.count(), 0) << id;
  return judge_training(reference.curve, trained);
}

TEST(TrainingCurveControl, FaultsOfTheCatalogueDivergeUnderBothOptimizers) {
  for (const char* id : {"dp_sum_missing", "micro_batch_average_missing",
                         "norm_grad_averaged_over_tp", "grads_zeroed_each_micro_batch"}) {
    for (const Kind optimizer : {Kind::kAdamW, Kind::kSgd}) {
      const CurveVerdict verdict = with_fault_trained(id, optimizer);
      EXPECT_EQ(verdict.status, Status::kDiverges) << id << ": " << render(verdict);
    }
  }
}

TEST(TrainingCurveControl, ReplicasThatPartAreNamedWithStepTensorAndRanks) {
  const CurveVerdict verdict = with_fault_trained("dp_sum_missing", Kind::kSgd);

  EXPECT_THAT(verdict.reason,
              AllOf(HasSubstr("ranks 0 and 1 hold different copies of"), HasSubstr("(step 7)")));
}

/// On tp rank 1 the reported losses of the two dp ranks are moved by `offset`, one up and one down:
/// their sum, the loss, is what it was, bit by bit.
TrainOptions rank_losses_moved_on_tp_rank_1(double offset) {
  TrainOptions options;
  options.run.edits.parts = [offset](TrainerParts& parts, Mesh& mesh) {
    if (mesh.coordinate(Axis::kTp) != 1) return;
    const double own = mesh.coordinate(Axis::kDp) == 0 ? offset : -offset;
    StrategyRules rules;
    rules.loss = [own](const Strategy& inner, const LossInputs& in) {
      CrossEntropy right = in.loss_by(inner);
      right.sample_sum_B = right.sample_sum_B.to(at::kDouble) + own;
      return right;
    };
    parts.strategy = strategy_double(std::move(parts.strategy), std::move(rules));
  };
  return options;
}

TEST(TrainingCurveControl, RankLossesThatDifferOverTpDiverge) {
  Case item = tiny("autotp", Kind::kSgd, Dtype::kFloat32);
  item.settings.loss_mean = LossMean::kSum;
  item.steps = 3;
  ASSERT_EQ(item.world_size(), 4);

  const CurveVerdict same = trained_and_judged(item, rank_losses_moved_on_tp_rank_1(0));
  const CurveVerdict moved = trained_and_judged(item, rank_losses_moved_on_tp_rank_1(0.125));

  EXPECT_EQ(same.status, Status::kConforms) << render(same);
  EXPECT_EQ(moved.status, Status::kDiverges) << render(moved);
  EXPECT_FALSE(moved.first.has_value()) << "every number of the curve itself is right";
  EXPECT_THAT(moved.reason, AllOf(HasSubstr("loss of dp rank 0 of step 0: rank 0 reports"),
                                  HasSubstr("rank 1 ")));
}

TEST(TrainingReference, ChaoticCaseIsVacuous) {
  Case item = tiny("ddp", Kind::kSgd, Dtype::kFloat32);
  item.settings.optimizer.learning_rate = 30;
  item.settings.max_grad_norm = 0;

  const CurveVerdict verdict = trained_and_judged(item);

  EXPECT_EQ(verdict.status, Status::kVacuous) << render(verdict);
  EXPECT_THAT(verdict.reason, testing::AnyOf(HasSubstr("the case is chaotic"),
                                             HasSubstr("the reference's own loss is")));
}

TEST(TrainingReference, DoesNotDependOnTheSubject) {
  const Case ddp = tiny("ddp", Kind::kSgd, Dtype::kFloat32),
             autotp = tiny("autotp", Kind::kSgd, Dtype::kFloat32);

  const Curve &first = train_reference(ddp).curve, second = train_reference(autotp).curve;

  EXPECT_EQ(curve_text(first), curve_text(second));
  EXPECT_EQ(first.perturbed_runs, 5);
  EXPECT_GT(first.spreads.back().loss, 0);
}

TEST(TrainingReference, IsTheSameWhateverOnlySubjectsHave) {
  Case item = tiny("fsdp_tp", Kind::kSgd, Dtype::kFloat32);
  item.mesh_order = {Axis::kTp, Axis::kDp};
  item.reduction_order = ReductionOrder::kRing;
  item.settings.make_vocab_size_divisible_by = 8;
  item.settings.zero_stage = 2;
  item.settings.reduce_dtype = Dtype::kFloat64;
  item.settings.recompute_every = 1;
  item.settings.sequence_parallel = item.settings.distributed_optimizer = true;

  const Case reference = reference_case(item);

  EXPECT_NO_THROW(reference.validate());
  EXPECT_EQ(reference.slug(), reference_case(tiny("ddp", Kind::kSgd, Dtype::kFloat32)).slug());
  EXPECT_EQ(reference.reduction_order, ReductionOrder::kOrdered);
  item.settings.reduce_dtype = Dtype::kBFloat16;
  EXPECT_EQ(reference_case(item).coarsest_dtype(), Dtype::kBFloat16)
      << "coarser than the run's own: the bounds depend on it";
}

TEST(TrainingReference, EachPerturbedRunIsAnotherOne) {
  Case item = tiny("ddp", Kind::kSgd, Dtype::kFloat32);
  item.steps = 3;

  const Curve one = train_reference(item, 1).curve, five = train_reference(item, 5).curve;

  bool is_wider = false;
  for (std::size_t i = 0; i < one.spreads.size(); ++i) {
    EXPECT_GE(five.spreads[i].loss, one.spreads[i].loss) << "the first of the five is that one";
    is_wider = is_wider || five.spreads[i].loss > one.spreads[i].loss;
  }
  EXPECT_TRUE(is_wider) << "five equal runs say no more than one";
}

TEST(TrainingReference, WhosePerturbedRunsEndEarlyIsChaotic) {
  Case item = tiny("ddp", Kind::kSgd, Dtype::kFloat32);
  item.steps = 3;
  TrainOptions options;
  options.run.edits.parts = [](TrainerParts& parts, Mesh&) {
    if (dynamic_cast<const PerturbedWeights*>(parts.weights.get()) == nullptr) return;
    parts.optimizer = optimizer_double(
        std::move(parts.optimizer), [](Optimizer&, NamedTensors& parameters, const NamedTensors&) {
          parameters.at("model.norm.weight").fill_(std::numeric_limits<double>::quiet_NaN());
        });
  };

  const TrainedCase reference = train_reference(item, 1, options);

  EXPECT_TRUE(reference.is_sound());
  EXPECT_THAT(reference.curve.steps, SizeIs(3));
  EXPECT_THAT(chaos_of(reference.curve, {}), HasSubstr("chaotic"));
}

TEST(TrainingReference, OfALatticeModelHasNoSpread) {
  Case item = lattice_case();
  item.steps = 2;
  item.degrees.dp = 2;

  const Curve curve = train_reference(item).curve;

  EXPECT_EQ(curve.perturbed_runs, 0);
  EXPECT_THAT(curve.spreads, IsEmpty());
}

TEST(TrainingBounds, AreThePublishedOnes) {
  Curve curve;
  curve.subject = "autotp";
  curve.settings = R"({"dtype":"bf16","autocast":null})";
  EXPECT_EQ(curve_bounds(curve).ceiling, 0.05);
  curve.subject = "fsdp_tp";
  EXPECT_EQ(curve_bounds(curve).ceiling, 0.02);
  curve.settings = R"({"dtype":"fp32","autocast":null})";
  EXPECT_EQ(curve_bounds(curve).ceiling, 1e-4);
  curve.settings = R"({"dtype":"fp32","autocast":"bf16"})";
  EXPECT_EQ(curve_bounds(curve).ceiling, 0.02);
  curve.settings = R"({"dtype":"fp32","reduce_dtype":"bf16"})";
  EXPECT_EQ(curve_bounds(curve).ceiling, 0.02);
  curve.settings =
      R"({"dtype":"fp32","loss_mean":"sum","data":{"dp":2,"batch_size":3,"micro_batches":4,)"
      R"("seq_length":5}})";
  EXPECT_EQ(curve_bounds(curve).ceiling, 120 * 1e-4) << "a sum of so many tokens' losses";
  EXPECT_EQ(curve_bounds(curve).factor, 3);
  EXPECT_EQ(curve_bounds(curve).relative_floor, 1e-6);
}

TEST(TrainingBounds, AreKnownForUsualRatesOnly) {
  Case adamw = tiny("ddp", Kind::kAdamW, Dtype::kFloat32),
       sgd = tiny("ddp", Kind::kSgd, Dtype::kFloat32);
  EXPECT_THAT(outside_range(adamw), IsEmpty());
  EXPECT_THAT(outside_range(sgd), IsEmpty());
  adamw.settings.optimizer.learning_rate = 1.1e-3;
  EXPECT_THAT(outside_range(adamw), HasSubstr("adamw"));
  sgd.settings.max_grad_norm = 0;
  EXPECT_THAT(outside_range(sgd), HasSubstr("without clipping"));
  sgd.settings.max_grad_norm = 1;
  sgd.settings.optimizer.learning_rate = 0.11;
  EXPECT_THAT(outside_range(sgd), Not(IsEmpty()));
  sgd.dtype = Dtype::kBFloat16;
  sgd.settings.optimizer.learning_rate = 0.02;
  EXPECT_THAT(outside_range(sgd), IsEmpty());
  sgd.settings.optimizer.learning_rate = 0.021;
  EXPECT_THAT(outside_range(sgd), HasSubstr("above 0.02"));
}

}  // namespace
}  // namespace isoshard
