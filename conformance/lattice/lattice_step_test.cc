// SPDX-License-Identifier: Apache-2.0
// A lattice model's step is equal to the single process's in
// every value, for every subject, mesh, dtype and reduction order.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>

#include "core/base/error.h"
#include "fixtures/cases/setting.h"
#include "fixtures/inputs/inputs.h"
#include "harness/judge/judge.h"
#include "harness/verdict/verdict.h"
#include "subjects/optim/wrapped_optimizer.h"
#include "subjects/registry/subject_spec.h"
#include "suite/testing/every_nth.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

struct LatticeRun {
  Case item;
  ReductionOrder order = ReductionOrder::kOrdered;
};
void PrintTo(const LatticeRun& run, std::ostream* out) {
  *out << run.item.slug() << ' ' << name_of(run.order);
}

Case case_of(const std::string& subject, const Degrees& degrees, Dtype dtype,
             int row_nonzeros = 1) {
  Case item = lattice_case(row_nonzeros);
  item.subject = subject;
  item.degrees = degrees;
  item.dtype = dtype;
  return item;
}

// One and two non-zero entries a row, two micro-batches, several steps where the dtype has the
// bits, copied kv heads, a split vocabulary.
std::vector<Case> variants(const SubjectSpec& spec, const Degrees& degrees) {
  const std::string subject(spec.name);
  std::vector<Case> cases = {case_of(subject, degrees, Dtype::kBFloat16),
                             case_of(subject, degrees, Dtype::kFloat16),
                             case_of(subject, degrees, Dtype::kFloat32, 2)};
  Case accumulated = case_of(subject, degrees, Dtype::kBFloat16);
  accumulated.batch_size = 1;
  accumulated.micro_batches = 2;
  accumulated.data.unequal_labels = true;
  cases.push_back(accumulated);
  Case steps = case_of(subject, degrees, Dtype::kFloat64);
  steps.config.num_layers = 1;
  steps.model_name += "_1_layer";
  steps.steps = 2;
  steps.batch_size = 1;
  steps.seq_length = 2;
  steps.settings.optimizer.learning_rate = 0.5;
  cases.push_back(steps);
  Case one_kv_head = with_heads(case_of(subject, degrees, Dtype::kFloat32, 2), 12, 1);
  one_kv_head.batch_size = 1;
  one_kv_head.seq_length = 5;
  cases.push_back(one_kv_head);
  if (spec.takes("make_vocab_size_divisible_by")) {
    cases.push_back(cases[0]);
    cases.back().settings.make_vocab_size_divisible_by = 8;
  }
  for (Case& item : cases) {
    if (needs_fp32_masters(item)) item.settings.master_dtype = Dtype::kFloat32;
  }
  return cases;
}

std::vector<LatticeRun> runs() {
  std::vector<LatticeRun> runs;
  const auto add = [&](const SubjectSpec& spec, const Degrees& degrees) {
    for (const Case& item : variants(spec, degrees)) {
      for (const ReductionOrder order :
           {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree}) {
        const bool all_orders = item.world_size() > 1 && item.micro_batches == 1 &&
                                item.steps == 1 &&
                                item.subject == usual_subject(degrees.tp > 1, degrees.dp > 1);
        if (all_orders || order == ReductionOrder::kOrdered) runs.push_back({item, order});
      }
    }
  };
  for (const SubjectSpec& spec : subject_specs()) {
    if (spec.is_reference()) continue;
    for (const Degrees& degrees : {Degrees{},
                                   {.dp = 2},
                                   {.dp = 3},
                                   {.tp = 2},
                                   {.tp = 3},
                                   {.tp = 4},
                                   {.dp = 2, .tp = 2},
                                   {.dp = 3, .tp = 2},
                                   {.dp = 2, .tp = 3}}) {
      if (degrees.tp == 1 || spec.has(Axis::kTp)) add(spec, degrees);
    }
  }
  return runs;
}

std::string run_name(const ::testing::TestParamInfo<LatticeRun>& info) {
  return info.param.item.slug() + "_" + std::string(name_of(info.param.order));
}

class LatticeStep : public ::testing::TestWithParam<LatticeRun> {
 protected:
  static void expect_equal_to_the_reference() {
    const LatticeRun& run = GetParam();
    RunOptions options;
    options.order = run.order;
    const Reference& reference = reference_of(run.item);

    const Trace actual = run_case(run.item, reference, options);
    const Verdict verdict = judge(reference, actual, policy_of(run.item));

    ASSERT_EQ(static_cast<int>(actual.ranks.size()), run.item.world_size());
    EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
    EXPECT_GT(verdict.compared, 70);
    std::int64_t nonzero = 0;
    for (const TensorComparison& tensor : verdict.tensors) {
      EXPECT_EQ(tensor.level, Level::kExact) << describe(tensor.key);
      EXPECT_EQ(tensor.stats.unequal_values, 0) << describe(tensor.key);
      nonzero += tensor.stats.sum_sq_reference > 0 ? 1 : 0;
    }
    EXPECT_GT(nonzero, 60) << "tensors of zeros show nothing";
  }
};

TEST_P(LatticeStep, IsEqualToTheReference) {
  expect_equal_to_the_reference();
}
class LatticeStepWide : public LatticeStep {};
TEST_P(LatticeStepWide, IsEqualToTheReference) {
  expect_equal_to_the_reference();
}
INSTANTIATE_TEST_SUITE_P(EverySubject, LatticeStep, ::testing::ValuesIn(every_nth(5, runs())),
                         run_name);
INSTANTIATE_TEST_SUITE_P(EverySubject, LatticeStepWide,
                         ::testing::ValuesIn(all_but_every_nth(5, runs())), run_name);

Verdict verdict_of(const Case& item, const RunOptions& options) {
  const Reference& reference = reference_of(item);
  return judge(reference, run_case(item, reference, options), policy_of(item));
}

// Turns the sign of one non-zero entry of one parameter, on one rank only.
class OneSignTurned final : public WeightSource {
 public:
  OneSignTurned(std::shared_ptr<const WeightSource> inner, std::string name)
      : inner_(std::move(inner)), name_(std::move(name)) {}
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                                const Shape& size) const override {
    at::Tensor part = inner_->read(spec, offset, size);
    if (spec.name != name_) return part;
    at::Tensor flat = part.view({-1});
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      if (flat[i].item<float>() == 0) continue;
      flat[i].neg_();
      break;
    }
    return part;
  }

 private:
  std::shared_ptr<const WeightSource> inner_;
  std::string name_;
};

TEST(LatticeFaults, OneEntryOfAnyParameterOnOneRankIsSeen) {
  const Case item = case_of("autotp", {.dp = 2, .tp = 3}, Dtype::kBFloat16);
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    RunOptions options;
    options.edits.parts = [name = spec.name](TrainerParts& parts, Mesh& mesh) {
      if (mesh.rank() == 4) parts.weights = std::make_shared<OneSignTurned>(parts.weights, name);
    };

    const Verdict verdict = verdict_of(item, options);

    ASSERT_EQ(verdict.status, Status::kDiverges) << spec.name;
    EXPECT_EQ(verdict.findings.front().key.name, spec.name);
    EXPECT_THAT(verdict.findings.front().ranks, ::testing::Contains(4)) << spec.name;
  }
}

TEST(LatticeFaults, ALostSummandOfARowParallelLayerIsSeenThere) {
  Case item = case_of("autotp", {.dp = 2, .tp = 3}, Dtype::kBFloat16);
  item.settings.record_partials = true;
  for (const std::string module :
       {"model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"}) {
    RunOptions options;
    options.mutation = [module](int rank) -> TapMutation {
      return [module, rank](const Site& site, at::Tensor value) {
        const bool is_lost =
            site.kind == RecordKind::kActivation && site.name == module + ".partial" && rank == 1;
        return is_lost ? value * 0 : value;
      };
    };

    const Verdict verdict = verdict_of(item, options);

    ASSERT_EQ(verdict.status, Status::kDiverges) << module;
    EXPECT_EQ(verdict.findings.front().key.name, module);
    EXPECT_EQ(verdict.findings.front().stage, Stage::kForward);
  }
}

// One unit, on one rank, in one element of one activation gradient: everything above it must not
// hide it.
TEST(LatticeFaults, OneUnitInOneElementOfAGradientIsSeen) {
  const Case item = case_of("ddp", {.dp = 3}, Dtype::kFloat32, 2);
  RunOptions options;
  options.mutation = [](int rank) -> TapMutation {
    return [rank](const Site& site, at::Tensor value) {
      if (site.kind != RecordKind::kActivationGrad ||
          site.name != "model.layers.0.self_attn.v_proj" || rank != 2)
        return value;
      at::Tensor changed = value.clone();
      changed.view({-1})[0].add_(1);
      return changed;
    };
  };

  const Verdict verdict = verdict_of(item, options);

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().key.name, "model.layers.0.self_attn.v_proj");
  EXPECT_EQ(verdict.tensors.at(0).level, Level::kExact);
}

// Puts one element of one parameter back to what it was before each step.
class OneElementKept final : public WrappedOptimizer {
 public:
  OneElementKept(std::unique_ptr<Optimizer> inner, std::string name)
      : WrappedOptimizer(std::move(inner)), name_(std::move(name)) {}
  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    const at::Tensor parameter = parameters.at(name_), before = parameter.detach().clone();
    inner().step(parameters, gradients);
    const at::Tensor moved = (parameter != before).nonzero();
    ASSERT_GT(moved.size(0), 0);
    const auto place = moved[0][0].item<std::int64_t>();
    parameter[place].copy_(before[place]);
  }

 private:
  std::string name_;
};

TEST(LatticeFaults, AnElementThatIsNotUpdatedOnOneRankIsSeen) {
  const Case item = case_of("ddp", {.dp = 2}, Dtype::kBFloat16);
  const std::string name = "model.layers.1.mlp.up_proj.bias";
  RunOptions options;
  options.edits.parts = [name](TrainerParts& parts, Mesh& mesh) {
    if (mesh.rank() == 1)
      parts.optimizer = std::make_unique<OneElementKept>(std::move(parts.optimizer), name);
  };

  const Verdict verdict = verdict_of(item, options);

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().key.name, name);
  EXPECT_THAT(verdict.findings.front().ranks, ::testing::ElementsAre(1));
}

}  // namespace
}  // namespace isoshard
