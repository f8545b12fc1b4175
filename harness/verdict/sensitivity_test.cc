// SPDX-License-Identifier: Apache-2.0
/// Claims about what a verdict is worth: what passes although it is wrong makes it vacuous, and
/// published bounds hold beside it.
#include "harness/verdict/sensitivity.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/judge/judge.h"
#include "harness/stats/tolerance.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/would_miss.h"

namespace isoshard {
namespace {

using namespace synthetic;

Body forward(const std::string& name, const at::Tensor& value) {
  return [=](Sink& sink, int) {
    (void)sink.on_activation(site(RecordKind::kActivation, name, layout_of(value.sizes().vec())),
                             value);
  };
}

/// Responses of about 0.58 x `movement`, relative.
Reference moving(const std::string& name, const at::Tensor& value, double movement) {
  return reference(forward(name, value), [=](int i) {
    return forward(name, value * (1 + movement * values(value.sizes().vec(), 50 + i, at::kDouble)));
  });
}

Verdict judged(const Reference& reference, const Body& actual, Dtype coarsest) {
  JudgePolicy options;
  options.coarsest = coarsest;
  return judge(reference, run(MeshShape(), &reference, actual), options);
}

TEST(Sensitivity, AComparisonThatWouldPassAWrongScaleIsVacuous) {
  const at::Tensor x = values({4, 4}, 1, at::kDouble);
  for (const auto& [coarsest, fine, coarse] : {std::tuple{Dtype::kFloat64, 1e-5, 1e-2},
                                               {Dtype::kFloat32, 1e-5, 1e-2},
                                               {Dtype::kBFloat16, 1e-1, 0.6}}) {
    const Verdict enough = judged(moving("x", x, fine), forward("x", x), coarsest);
    const Verdict too_little = judged(moving("x", x, coarse), forward("x", x), coarsest);

    EXPECT_EQ(enough.status, Status::kConforms) << enough.reason;
    EXPECT_LT(enough.tensors.at(0).scale_sensitivity, weakness_ceiling({}, coarsest));
    EXPECT_EQ(too_little.status, Status::kVacuous) << name_of(coarsest) << too_little.reason;
    EXPECT_THAT(too_little.rule,
                RuleIs(RuleId::kInconclusive, {{"tensor", "forward at x (step 0)"}, {"weak", 1}}));
  }
}

TEST(Sensitivity, CeilingsAreThoseOfTheDesign) {
  const RecordKey gradient{0, RecordKind::kGrad, "w", 0},
      square{0, RecordKind::kOptimizer, "w.exp_avg_sq", 0};

  EXPECT_EQ(scale_ceiling(gradient, Dtype::kFloat64), 1e-9);
  EXPECT_EQ(weakness_ceiling(gradient, Dtype::kFloat64), 1e-3);
  EXPECT_EQ(scale_ceiling(gradient, Dtype::kFloat32), 1e-3);
  EXPECT_EQ(scale_ceiling(gradient, Dtype::kBFloat16), 0.5);
  EXPECT_EQ(scale_ceiling(gradient, Dtype::kFloat16), 0.5);
  EXPECT_DOUBLE_EQ(scale_ceiling(square, Dtype::kBFloat16), 1.25) << "1.5 squared";
}

TEST(Sensitivity, ARolledCopyIsRejectedWhereTheVerdictSaysSo) {
  const at::Tensor x = values({4, 6}, 1);
  const Reference r = moving("x", x, 1e-5);

  const Verdict right = judged(r, forward("x", x), Dtype::kFloat32);
  const Verdict rolled =
      judged(r, forward("x", x.reshape({-1}).roll(1).reshape({4, 6})), Dtype::kFloat32);

  ASSERT_EQ(right.status, Status::kConforms) << right.reason;
  EXPECT_EQ(right.tensors.at(0).rolled_copy, ShiftedCopy::kRejected);
  EXPECT_EQ(rolled.status, Status::kDiverges);
  EXPECT_NEAR(rolled.tensors.at(0).stats.relative_error(), right.tensors.at(0).rolled_error, 1e-12);
}

TEST(Sensitivity, AComparisonThatWouldPassARolledCopyIsVacuous) {
  const at::Tensor nearly_even = 1 + 1e-5 * values({64}, 1, at::kDouble);
  const Verdict verdict =
      judged(moving("x", nearly_even, 1e-5), forward("x", nearly_even), Dtype::kFloat32);

  EXPECT_EQ(verdict.status, Status::kVacuous);
  EXPECT_THAT(verdict.rule, RuleIs(RuleId::kInconclusive));
  EXPECT_EQ(verdict.tensors.at(0).rolled_copy, ShiftedCopy::kPassed);
}

TEST(Sensitivity, ATensorThatVariesByRoundingsOnlyHasNoOrderToShow) {
  for (const at::Tensor& even :
       {at::ones({64}, at::kDouble), (1 + 1e-8 * values({64}, 1, at::kDouble)).contiguous()}) {
    const Verdict verdict = judged(moving("x", even, 1e-7), forward("x", even), Dtype::kFloat32);

    EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
    EXPECT_EQ(verdict.tensors.at(0).rolled_copy, ShiftedCopy::kFlat);
  }
}

TEST(Sensitivity, SquaresThatVaryByTheirNoiseHaveNoOrderToShow) {
  const RecordKey square{0, RecordKind::kOptimizer, "w.exp_avg_sq", 0};
  const RecordKey mean{0, RecordKind::kOptimizer, "w.exp_avg", 0};
  const auto judged_as = [&](const RecordKey& key, Dtype coarsest, double allowed) {
    TensorComparison c;
    c.key = key;
    c.rolled_error = 1e-5;
    c.allowed_relative_error = c.allowed_scale_error = allowed;
    return judged_shifted_copy(c, 3, coarsest, allowed / responses_allowed(3, coarsest));
  };

  EXPECT_EQ(judged_as(square, Dtype::kFloat32, 6e-5), ShiftedCopy::kFlat);
  EXPECT_EQ(judged_as(mean, Dtype::kFloat32, 6e-5), ShiftedCopy::kPassed);
  EXPECT_EQ(judged_as(square, Dtype::kFloat32, 2e-5), ShiftedCopy::kPassed) << "2.8 responses";
  EXPECT_EQ(judged_as(square, Dtype::kFloat32, 1e-2), ShiftedCopy::kPassed) << "above the ceiling";
}

TEST(Sensitivity, OfALargeTensorIsMeasuredOnItsFirstElements) {
  const at::Tensor x = values({300'000}, 1);
  const Reference r = moving("x", x, 1e-6);

  const double error = rolled_error(r, *r.find({0, RecordKind::kActivation, "x", 0}));

  EXPECT_NEAR(error, std::sqrt(2.0), 0.02) << "neighbours are independent here";
}

TEST(Sensitivity, ATensorOfNoiseIsListedInsteadOfMakingTheVerdictVacuous) {
  const auto noise = [](int seed) { return forward("b", 1e-9 * values({8}, seed)); };
  const Reference r = reference(noise(1), [&](int i) { return noise(10 + i); });

  const Verdict verdict = judged(r, noise(30), Dtype::kFloat32);

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_TRUE(verdict.tensors.at(0).insensitive);
  EXPECT_TRUE(verdict.tensors.at(0).weakness.empty());
}

TEST(PublishedBounds, BreakTheVerdictWhereTheToleranceAloneWouldPass) {
  const at::Tensor x = values({64, 64}, 1, at::kDouble);
  const Reference r = moving("model.layers.1", x, 0.1);
  const auto off_by = [&](double error) {
    at::Tensor moved = x.clone();
    moved[2][3] += error;
    return judged(r, forward("model.layers.1", moved), Dtype::kBFloat16);
  };

  const Verdict inside = off_by(0.14), outside = off_by(0.16);

  EXPECT_EQ(inside.status, Status::kConforms) << inside.reason;
  ASSERT_EQ(inside.published.size(), 1U);
  EXPECT_NEAR(inside.published[0].measured, 0.14, 1e-9);
  EXPECT_EQ(inside.published[0].limit, 0.15);
  ASSERT_EQ(outside.status, Status::kDiverges);
  EXPECT_TRUE(outside.tensors.at(0).within);
  EXPECT_THAT(outside.findings.at(0),
              FindingIs(FindingId::kOutsidePublishedBound, {{"published", 0.15}}));
  EXPECT_FALSE(outside.published[0].holds);
}

TEST(PublishedBounds, AreAboutLayerOutputsOfStepZeroAndLosses) {
  std::vector<TensorComparison> tensors;
  const auto add = [&](RecordKind kind, const char* name, int step, double error) {
    TensorComparison t;
    t.key = {step, kind, name, 0};
    t.stats.max_abs = error;
    t.reference_values = {5};
    t.actual_values = {5 + error};
    tensors.push_back(t);
  };
  add(RecordKind::kActivation, "model.layers.0.mlp", 0, 9);
  add(RecordKind::kActivation, "model.layers.0", 1, 8);
  add(RecordKind::kActivation, "model.layers.0", 0, 0.1);
  add(RecordKind::kActivation, "transformer.ln_f", 0, 0.2);
  add(RecordKind::kScalar, "loss", 1, 0.01);
  add(RecordKind::kScalar, "grad_norm", 0, 7);

  const auto fp32 = published_bounds(tensors, Dtype::kFloat32),
             fp16 = published_bounds(tensors, Dtype::kFloat16);

  ASSERT_EQ(fp32.size(), 2U);
  EXPECT_EQ(fp32[0].tensor, "transformer.ln_f");
  EXPECT_EQ(fp32[0].limit, 1e-3);
  EXPECT_FALSE(fp32[0].holds);
  EXPECT_NEAR(fp32[1].measured, 0.002, 1e-12);
  EXPECT_TRUE(fp32[1].holds);
  EXPECT_EQ(fp16.size(), 1U) << "nobody publishes a bound for outputs in fp16";
}

// A run that blows up: what its legal repetitions do not hold, it need not hold.
TEST(PublishedBounds, OfLossesBindWhereLegalRunsKeepThem) {
  std::vector<TensorComparison> tensors;
  for (const int step : {1, 2}) {
    TensorComparison t;
    t.key = {step, RecordKind::kScalar, "loss", 0};
    t.reference_values = {100};
    t.actual_values = {step == 1 ? 100.5 : 130};
    tensors.push_back(t);
  }
  const auto response = [](double of_last) {
    return [of_last](const RecordKey& key) { return key.step == 2 ? of_last : 1e-3; };
  };

  const auto sane = published_bounds(tensors, Dtype::kFloat64, response(0.0099));
  const auto wild = published_bounds(tensors, Dtype::kFloat64, response(0.0101));

  ASSERT_EQ(sane.size(), 1U);
  EXPECT_FALSE(sane[0].holds);
  EXPECT_EQ(sane[0].too_wild, 0);
  ASSERT_EQ(wild.size(), 1U);
  EXPECT_TRUE(wild[0].holds);
  EXPECT_EQ(wild[0].too_wild, 1);
  EXPECT_NEAR(wild[0].measured, 0.005, 1e-12) << "the other step is held to it";
  EXPECT_EQ(wild[0].key.step, 1);
}

TEST(PublishedBounds, LossesOfSixteenBitsAreNotHeldToThem) {
  const auto bound_of = [](double loss) {
    TensorComparison t;
    t.key = {0, RecordKind::kScalar, "loss", 0};
    t.reference_values = {loss};
    t.actual_values = {1.012 * loss};
    return published_bounds({t}, Dtype::kBFloat16).at(0);
  };

  EXPECT_TRUE(bound_of(0x1.02p1).holds);
  EXPECT_EQ(bound_of(0x1.02p1).too_wild, 1);
  EXPECT_FALSE(bound_of(0x1.02345p1).holds) << "a loss in fp32 of a model in bf16";
}

TEST(PublishedBounds, AreOfLayersAndTheNormBehindThemWhateverTheirNames) {
  const auto bounds_of = [](const char* name) {
    TensorComparison t;
    t.key = {0, RecordKind::kActivation, name, 0};
    return published_bounds({t}, Dtype::kFloat32).size();
  };

  for (const char* name : {"model.layers.3", "transformer.h.0", "decoder.layers.11", "model.norm",
                           "transformer.ln_f", "decoder.final_layernorm"})
    EXPECT_EQ(bounds_of(name), 1U) << name;
  for (const char* name : {"model.layers.3.input_layernorm", "model.layers.0.self_attn.q_norm",
                           "transformer.h.0.ln_1", "lm_head"})
    EXPECT_EQ(bounds_of(name), 0U) << name;
}

TEST(PublishedBounds, AreOfValuesAsLargeAsThePublishedOnes) {
  TensorComparison t;
  t.key = {0, RecordKind::kActivation, "model.layers.0", 0};
  t.stats.max_abs = 1.0;
  t.stats.max_abs_reference = 55;

  const auto bounds = published_bounds({t}, Dtype::kBFloat16);
  t.stats.nonfinite_mismatch = 1;

  EXPECT_DOUBLE_EQ(bounds.at(0).measured, 0.1);
  EXPECT_FALSE(published_bounds({t}, Dtype::kBFloat16).at(0).holds) << "a NaN is outside any bound";
}

// A pool may be of a step whose tensors are all rounding noise, as where a run has gone far.
TEST(Sensitivity, APoolOfAStepThatShowsNothingChangesNothing) {
  const auto gradient = [](int step, bool insensitive) {
    TensorComparison t;
    t.key = {step, RecordKind::kGrad, "w", 0};
    t.stats.numel = 4;
    t.stats.sum_sq_reference = t.stats.sum_sq_actual = 1;
    t.scale_sensitivity = 0.25;
    t.insensitive = insensitive;
    return t;
  };
  Verdict verdict;
  verdict.compared = 2;
  verdict.tensors = {gradient(0, false), gradient(1, true)};
  const std::string without = would_miss(verdict, {});
  PooledComparison pool;
  pool.allowed_scale = {0.9, 1.1};
  for (const int step : {1, 0}) {
    pool.first = {step, RecordKind::kGrad, "w", 0};
    verdict.pools = {pool};
    EXPECT_EQ(would_miss(verdict, {}) == without, step == 1) << step;
  }
}

}  // namespace
}  // namespace isoshard
