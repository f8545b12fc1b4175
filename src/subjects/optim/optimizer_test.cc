// SPDX-License-Identifier: Apache-2.0
// The update rules against formulas worked out element by
// element, and what happens to odd arguments. ATen may fuse a multiply and an add where these
// formulas do not, hence EXPECT_DOUBLE_EQ.
#include "subjects/optim/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/base/error.h"

namespace isoshard {
namespace {

using Kind = OptimizerSettings::Kind;

at::Tensor numbers(std::initializer_list<double> values, at::ScalarType dtype = at::kDouble) {
  return at::tensor(at::ArrayRef<double>(values), at::kDouble).to(dtype);
}

OptimizerSettings sgd(double momentum, double weight_decay) {
  OptimizerSettings settings;
  settings.kind = Kind::kSgd;
  settings.learning_rate = 0.1;
  settings.momentum = momentum;
  settings.weight_decay = weight_decay;
  return settings;
}

OptimizerSettings adamw(double weight_decay) {
  OptimizerSettings settings;
  settings.learning_rate = 0.01;
  settings.weight_decay = weight_decay;
  return settings;
}

TEST(SgdOptimizer, PlainStepSubtractsRateTimesGradient) {
  NamedTensors parameters{{"w", numbers({1.0, -2.0})}};
  const NamedTensors gradients{{"w", numbers({0.5, 4.0})}};

  make_optimizer(sgd(0, 0))->step(parameters, gradients);

  EXPECT_TRUE(at::equal(parameters["w"], numbers({1.0 - 0.1 * 0.5, -2.0 - 0.1 * 4.0})));
}

TEST(SgdOptimizer, MomentumStartsAsTheFirstGradientAndAddsLaterOnesWhole) {
  NamedTensors parameters{{"w", numbers({1.0})}};
  const auto optimizer = make_optimizer(sgd(0.9, 0));

  optimizer->step(parameters, {{"w", numbers({2.0})}});
  optimizer->step(parameters, {{"w", numbers({-1.0})}});

  const double buffer = 2.0 * 0.9 + -1.0;
  EXPECT_DOUBLE_EQ(optimizer->state().at("w.momentum_buffer").item<double>(), buffer);
  EXPECT_DOUBLE_EQ(parameters["w"].item<double>(), (1.0 + -0.1 * 2.0) + -0.1 * buffer);
}

TEST(SgdOptimizer, WeightDecayIsAddedToTheGradientNotToTheCallersTensor) {
  NamedTensors parameters{{"w", numbers({4.0})}};
  const NamedTensors gradients{{"w", numbers({1.0})}};

  make_optimizer(sgd(0.9, 0.5))->step(parameters, gradients);

  EXPECT_DOUBLE_EQ(parameters["w"].item<double>(), 4.0 - 0.1 * (1.0 + 0.5 * 4.0));
  EXPECT_EQ(gradients.at("w").item<double>(), 1.0);
}

TEST(SgdOptimizer, TheBufferIsNotTheCallersGradient) {
  NamedTensors parameters{{"w", numbers({1.0})}};
  const auto optimizer = make_optimizer(sgd(0.9, 0));
  at::Tensor gradient = numbers({2.0});

  optimizer->step(parameters, {{"w", gradient}});
  gradient.fill_(100.0);

  EXPECT_EQ(optimizer->state().at("w.momentum_buffer").item<double>(), 2.0);
}

struct AdamScalar {
  double p, m = 0, v = 0;
  int step = 0;
  void update(double gradient, double lr, double decay) {
    ++step;
    p *= 1 - lr * decay;
    m += (1 - 0.9) * (gradient - m);
    v = v * 0.999 + (1 - 0.999) * gradient * gradient;
    const double denominator = std::sqrt(v) / std::sqrt(1 - std::pow(0.999, step)) + 1e-8;
    p += -(lr / (1 - std::pow(0.9, step))) * (m / denominator);
  }
};

TEST(AdamWOptimizer, FiveStepsFollowTheFormulaOfEachElement) {
  for (const double decay : {0.0, 0.1}) {
    AdamScalar a{1.0}, b{-0.25};
    NamedTensors parameters{{"w", numbers({1.0, -0.25})}};
    const auto optimizer = make_optimizer(adamw(decay));

    for (int step = 0; step < 5; ++step) {
      const double gradient_a = 0.5 - 0.3 * step, gradient_b = 1e-3 * (step + 1);
      a.update(gradient_a, 0.01, decay);
      b.update(gradient_b, 0.01, decay);
      optimizer->step(parameters, {{"w", numbers({gradient_a, gradient_b})}});
    }

    EXPECT_NEAR(parameters["w"][0].item<double>(), a.p, 1e-15) << "decay " << decay;
    EXPECT_NEAR(parameters["w"][1].item<double>(), b.p, 1e-15) << "decay " << decay;
    const NamedTensors state = optimizer->state();
    EXPECT_NEAR(state.at("w.exp_avg")[0].item<double>(), a.m, 1e-16);
    EXPECT_NEAR(state.at("w.exp_avg_sq")[1].item<double>(), b.v, 1e-18);
  }
}

TEST(AdamWOptimizer, WeightDecayIsDecoupledFromTheMoments) {
  NamedTensors parameters{{"w", numbers({8.0})}};
  const auto optimizer = make_optimizer(adamw(0.5));

  optimizer->step(parameters, {{"w", numbers({0.0})}});

  EXPECT_EQ(parameters["w"].item<double>(), 8.0 * (1 - 0.01 * 0.5));
  EXPECT_EQ(optimizer->state().at("w.exp_avg").item<double>(), 0.0);
}

class EveryOptimizer : public testing::TestWithParam<Kind> {
 protected:
  [[nodiscard]] static OptimizerSettings settings() {
    return GetParam() == Kind::kSgd ? sgd(0.9, 0.1) : adamw(0.1);
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, EveryOptimizer, testing::Values(Kind::kSgd, Kind::kAdamW),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST_P(EveryOptimizer, LeavesAParameterWithoutGradientAloneAndKeepsNoStateForIt) {
  NamedTensors parameters{{"a", numbers({1.0})}, {"b", numbers({2.0})}};
  const auto optimizer = make_optimizer(settings());

  optimizer->step(parameters, {{"a", at::Tensor()}, {"b", numbers({1.0})}});

  EXPECT_EQ(parameters["a"].item<double>(), 1.0);
  EXPECT_NE(parameters["b"].item<double>(), 2.0);
  for (const auto& [name, value] : optimizer->state()) EXPECT_TRUE(name.starts_with("b.")) << name;
}

TEST_P(EveryOptimizer, AStepWithoutGradientDoesNotCount) {
  NamedTensors always{{"w", numbers({1.0})}}, late{{"w", numbers({1.0})}};
  const auto first = make_optimizer(settings()), second = make_optimizer(settings());
  const NamedTensors gradients{{"w", numbers({0.5})}};

  second->step(late, {{"w", at::Tensor()}});
  first->step(always, gradients);
  second->step(late, gradients);

  EXPECT_TRUE(at::equal(always["w"], late["w"]));
}

TEST_P(EveryOptimizer, StepsInPlaceInTheParametersDtypeAlsoOfLeavesThatRequireGrad) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor leaf = numbers({1.0, 2.0, 3.0}, dtype).requires_grad_(true);
    NamedTensors parameters{{"w", leaf}};

    const auto optimizer = make_optimizer(settings());
    optimizer->step(parameters, {{"w", numbers({1.0, 1.0, 1.0}, dtype)}});

    EXPECT_TRUE(parameters["w"].is_same(leaf));
    EXPECT_TRUE(leaf.requires_grad() && leaf.is_leaf());
    EXPECT_FALSE(at::equal(leaf.detach(), numbers({1.0, 2.0, 3.0}, dtype)));
    for (const auto& [name, value] : optimizer->state())
      EXPECT_EQ(value.scalar_type(), dtype) << name;
  }
}

TEST_P(EveryOptimizer, AnElementDoesNotDependOnWhatElseIsStepped) {
  const at::Tensor values = at::linspace(-1, 1, 24, at::kDouble).to(at::kFloat),
                   slopes = at::linspace(2, -3, 24, at::kDouble).to(at::kFloat);
  NamedTensors whole{{"w", values.clone()}},
      halves{{"a", values.slice(0, 0, 8).clone()}, {"b", values.slice(0, 8).clone()}};
  const auto first = make_optimizer(settings()), second = make_optimizer(settings());

  for (int step = 0; step < 3; ++step) {
    first->step(whole, {{"w", slopes}});
    second->step(halves, {{"a", slopes.slice(0, 0, 8)}, {"b", slopes.slice(0, 8)}});
  }

  EXPECT_TRUE(at::equal(whole["w"], at::cat({halves["a"], halves["b"]})));
}

TEST_P(EveryOptimizer, RefusesMapsWithDifferentNamesAndShapes) {
  NamedTensors parameters{{"w", numbers({1.0, 2.0})}};
  const auto optimizer = make_optimizer(settings());

  EXPECT_THROW(optimizer->step(parameters, {}), ShapeError);
  EXPECT_THROW(optimizer->step(parameters, {{"w", numbers({1.0, 1.0})}, {"v", numbers({1.0})}}),
               ShapeError);
  EXPECT_THROW(optimizer->step(parameters, {{"w", numbers({1.0})}}), ShapeError);
  EXPECT_TRUE(at::equal(parameters["w"], numbers({1.0, 2.0})));
}

TEST(OptimizerNames, ParseWhatTheyAreCalledAndRefuseTheRest) {
  EXPECT_EQ(parse_optimizer("sgd"), Kind::kSgd);
  EXPECT_EQ(parse_optimizer("adamw"), Kind::kAdamW);
  try {
    static_cast<void>(parse_optimizer("adamv"));
    FAIL() << "adamv was taken";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'adamw'?"), std::string::npos)
        << error.what();
  }
}

TEST(OptimizerSettingsCheck, RefusesNumbersThatMakeNoSense) {
  OptimizerSettings settings;
  settings.beta1 = 1.0;
  EXPECT_THROW(static_cast<void>(make_optimizer(settings)), UsageError);
  settings = {};
  settings.learning_rate = -1;
  EXPECT_THROW(static_cast<void>(make_optimizer(settings)), UsageError);
  settings.learning_rate = std::nan("");
  EXPECT_THROW(static_cast<void>(make_optimizer(settings)), UsageError);
}

class RestoredOptimizer : public ::testing::TestWithParam<OptimizerSettings> {};
INSTANTIATE_TEST_SUITE_P(Rules, RestoredOptimizer,
                         ::testing::Values(OptimizerSettings{.kind = Kind::kAdamW,
                                                             .weight_decay = 0.1},
                                           OptimizerSettings{.kind = Kind::kSgd},
                                           OptimizerSettings{.kind = Kind::kSgd, .momentum = 0.9}));

TEST_P(RestoredOptimizer, GoesOnBitByBit) {
  const std::unique_ptr<Optimizer> first = make_optimizer(GetParam()),
                                   second = make_optimizer(GetParam());
  NamedTensors uninterrupted{{"w", numbers({1, -2, 3})}};
  const auto gradient = [](int step) {
    return NamedTensors{{"w", numbers({0.5 + step, -0.25 * step, 2})}};
  };
  for (int step = 0; step < 3; ++step) first->step(uninterrupted, gradient(step));
  NamedTensors resumed{{"w", uninterrupted.at("w").clone()}}, state;
  for (const auto& [name, tensor] : first->state()) state.emplace(name, tensor.clone());
  ASSERT_EQ(first->rule(), second->rule());

  second->restore(state, first->updates());

  for (int step = 3; step < 6; ++step) {
    first->step(uninterrupted, gradient(step));
    second->step(resumed, gradient(step));
    EXPECT_TRUE(at::equal(uninterrupted.at("w"), resumed.at("w"))) << "step " << step;
  }
  EXPECT_EQ(first->updates(), second->updates());
}

TEST(RestoredOptimizer, RefusesStateThatIsNotItsOwn) {
  const NamedTensors moments{{"w.exp_avg", numbers({1})}, {"w.exp_avg_sq", numbers({1})}},
      half{{"w.exp_avg", numbers({1})}}, buffer{{"w.momentum_buffer", numbers({1})}};
  const std::unique_ptr<Optimizer> adamw = make_optimizer({.kind = Kind::kAdamW}),
                                   sgd = make_optimizer({.kind = Kind::kSgd}),
                                   momentum = make_optimizer({.kind = Kind::kSgd, .momentum = 0.5});

  EXPECT_THROW(adamw->restore(half, {{"w", 1}}), ShapeError);
  EXPECT_THROW(adamw->restore(moments, {}), ShapeError);
  EXPECT_THROW(adamw->restore(moments, {{"w", 0}}), ShapeError);
  EXPECT_THROW(sgd->restore(buffer, {}), ShapeError);
  EXPECT_THROW(momentum->restore(moments, {}), ShapeError);
  EXPECT_NO_THROW(momentum->restore(buffer, {}));
}

}  // namespace
}  // namespace isoshard
