// SPDX-License-Identifier: Apache-2.0 The guard lets exact cases pass, refuses others by op and
// numbers, and its formulas are the model's.
#include "suite/reference/lattice_guard.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "fixtures/cases/presets.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Case case_of(Dtype dtype, int row_nonzeros, int dp = 3) {
  Case c = lattice_case(row_nonzeros);
  c.dtype = dtype;
  c.degrees.dp = dp;
  return c;
}

TEST(LatticeGuard, LetsTheBuiltInModelsPass) {
  EXPECT_NO_THROW(require_exact(case_of(Dtype::kBFloat16, 1)));
  EXPECT_NO_THROW(require_exact(case_of(Dtype::kFloat32, 1)));
  EXPECT_NO_THROW(require_exact(case_of(Dtype::kFloat16, 1)));
  EXPECT_NO_THROW(require_exact(case_of(Dtype::kFloat32, 2)));
  EXPECT_NO_THROW(require_exact(case_of(Dtype::kFloat64, 2)));
}

TEST(LatticeGuard, NamesTheOpThatLeavesTheRange) {
  EXPECT_THAT(
      [] { require_exact(case_of(Dtype::kBFloat16, 2)); },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("model.layers."), HasSubstr("bf16 holds only 256"),
                                      HasSubstr("shorter"))));
  Case longer = case_of(Dtype::kBFloat16, 1);
  longer.seq_length = 64;
  EXPECT_THROW(require_exact(longer), UsageError);
  Case steps = case_of(Dtype::kBFloat16, 1);
  steps.steps = 4;
  EXPECT_THROW(require_exact(steps), UsageError);
}

// The norm's squares need twice the bits: its sum leaves fp64 before any other op does.
TEST(LatticeGuard, CountsTheSquaresOfTheNorm) {
  Case c = case_of(Dtype::kFloat64, 1);
  c.config.num_layers = 1;
  c.steps = 2;

  EXPECT_THAT([&] { require_exact(c); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("grad_norm"), HasSubstr("fp64"))));
}

TEST(LatticeGuard, RefusesSettingsThatRound) {
  const auto refusal = [](const std::function<void(Case&)>& change) {
    Case c = case_of(Dtype::kFloat32, 1);
    change(c);
    try {
      require_exact(c);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };

  EXPECT_THAT(refusal([](Case& c) { c.settings.loss_mean = LossMean::kGlobal; }),
              HasSubstr("loss mean global"));
  EXPECT_THAT(refusal([](Case& c) { c.settings.max_grad_norm = 1; }), HasSubstr("clipping at 1"));
  EXPECT_THAT(refusal([](Case& c) { c.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW; }),
              HasSubstr("adamw"));
  EXPECT_THAT(refusal([](Case& c) { c.settings.optimizer.learning_rate = 0.1; }),
              HasSubstr("learning rate 0.1"));
  EXPECT_THAT(refusal([](Case& c) { c.settings.optimizer.momentum = 0.9; }),
              HasSubstr("momentum 0.9"));
  EXPECT_THAT(refusal([](Case& c) { c.settings.optimizer.weight_decay = 0.5; }),
              HasSubstr("weight decay 0.5"));
  EXPECT_THAT(refusal([](Case& c) { c.settings.label_smoothing = 0.5; }),
              HasSubstr("label smoothing 0.5"));
  EXPECT_THAT(refusal([](Case& c) { c.settings.autocast = Dtype::kBFloat16; }),
              HasSubstr("autocast"));
  EXPECT_EQ(refusal([](Case& c) { c.settings.optimizer.momentum = 0; }), "accepted");
}

TEST(LatticeGuard, LeavesOtherModelsAlone) {
  EXPECT_NO_THROW(require_exact(tiny_fault_case()));
}

// Every recorded value is a multiple of a power of two within the range that the guard promised,
// and not a trivial one.
TEST(LatticeReference, HoldsSmallMultiplesOnly) {
  const Case item = case_of(Dtype::kBFloat16, 1);

  const Reference reference = make_reference(item);

  EXPECT_EQ(reference.response_runs(), 0);
  std::int64_t nonzero = 0, gradients = 0;
  for (const Record& record : reference.trace().ranks.at(0).records) {
    if (record.key.kind == RecordKind::kScalar || record.key.kind == RecordKind::kDataId) continue;
    // of the learning rate, 1/8
    const at::Tensor units = tensor_of(reference.trace().assemble(record.key)).to(at::kDouble) * 8;
    EXPECT_TRUE(at::equal(units, units.round())) << describe(record.key);
    EXPECT_LE(units.abs().max().item<double>(), 256 * 8) << describe(record.key);
    if (units.abs().max().item<double>() > 0)
      ++(record.key.kind == RecordKind::kGrad ? gradients : nonzero);
  }
  EXPECT_GE(gradients, 20) << "gradients that are all zero would show nothing";
  EXPECT_GE(nonzero, 60);
}

}  // namespace
}  // namespace isoshard
