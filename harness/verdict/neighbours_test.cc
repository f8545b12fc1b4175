// SPDX-License-Identifier: Apache-2.0
/// Claims about what is derived from other tensors' responses, each with what must still be
/// rejected.
#include "harness/verdict/neighbours.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "harness/judge/judge.h"
#include "harness/stats/tolerance.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;

const Layout kVector = layout_of({20});
const RecordKey kMoment{0, RecordKind::kOptimizer, "w.exp_avg_sq", 0};
const RecordKey kGradient{0, RecordKind::kGrad, "w", 0};

/// A gradient that two elements rule, its square as the optimizer's state, and an activation
/// gradient.
struct AdamMoments {
  at::Tensor gradient =
      values({20}, 3) * at::tensor({8.0F, 4.0F, 1.0F, 1.0F, 1.0F}).repeat({4}).pow(2);
  at::Tensor moment = gradient.square() * 0.001;
  at::Tensor query = at::zeros({20});

  Body body() const {
    return [*this](Sink& sink, int) {
      (void)sink.on_activation_grad(site(RecordKind::kActivationGrad, "hidden", kVector),
                                    values({20}, 5) * 1e-3);
      (void)sink.on_activation_grad(site(RecordKind::kActivationGrad, "query", kVector), query);
      sink.on_record(site(RecordKind::kGrad, "w", kVector), gradient);
      sink.on_record(site(RecordKind::kOptimizer, "w.exp_avg_sq", kVector), moment);
    };
  }
};

/// Perturbed runs move gradients by a hundredth, and by chance the moments by much less.
Reference reference_of_moments() {
  return reference(AdamMoments{}.body(), [](int i) {
    AdamMoments moved;
    moved.gradient = moved.gradient * (1 + 0.01 * values({20}, 50 + i));
    return moved.body();
  });
}

JudgePolicy bf16_options() {
  JudgePolicy options;
  options.coarsest = Dtype::kBFloat16;
  return options;
}

Status status_of(const AdamMoments& moments) {
  const Reference reference = reference_of_moments();
  return judge(reference, run(MeshShape(), &reference, moments.body()), bf16_options()).status;
}

double norm_of(const at::Tensor& t) {
  return t.to(at::kDouble).norm().item<double>();
}

// Between micro-batches gradients carry the loss scale: what they are says nothing of the floor
// under final gradients, and theirs is that floor times the scale.
TEST(CancellationNoise, IsThatOfFinalGradientsWhateverTheLossScaleBetweenMicroBatches) {
  const auto body = [](double moved) {
    return [=](Sink& sink, int) {
      const at::Tensor gradient = values({20}, 3) * (1 + moved);
      sink.on_record(site(RecordKind::kGrad, "w.micro_batch", kVector, 65536), gradient * 65536);
      sink.on_record(site(RecordKind::kGrad, "w", kVector), gradient);
    };
  };
  const Reference reference =
      synthetic::reference(body(0), [&](int i) { return body(1e-6 * (i + 1)); });
  const double norm = norm_of(values({20}, 3));

  EXPECT_NEAR(largest_norm_of_kind(reference, kGradient), norm, 1e-6 * norm);
  EXPECT_NEAR(largest_norm_of_kind(reference, {0, RecordKind::kGrad, "w.micro_batch", 0}),
              65536 * norm, 65536e-6 * norm);
}

TEST(ErrorOfSquares, NoErrorThatAGradientMayHaveMakesALargerOneAndTheWorstComesNear) {
  const Reference reference = reference_of_moments();
  const at::Tensor g = AdamMoments{}.gradient.to(at::kDouble);
  const double bound = error_of_squares(reference, kMoment, 3, Dtype::kBFloat16);
  const double allowed = 3 * reference.response(kGradient)->relative_error;
  ASSERT_GT(allowed, 0.01);

  double worst = 0;
  for (int i = 0; i < 20; ++i) {  // all of the error in one element
    at::Tensor moved = g.clone();
    moved[i] += std::copysign(allowed * norm_of(g), g[i].item<double>());
    worst = std::max(worst, norm_of(moved.square() - g.square()) / norm_of(g.square()));
  }

  EXPECT_LE(worst, bound * (1 + allowed)) << "the bound is of first order";
  EXPECT_GE(worst, 0.9 * bound);
}

TEST(ErrorOfSquares, IsOfSecondMomentsAlone) {
  const Reference reference = reference_of_moments();

  EXPECT_EQ(error_of_squares(reference, kGradient, 3, Dtype::kBFloat16), 0);
  EXPECT_EQ(
      error_of_squares(reference, {0, RecordKind::kOptimizer, "w.exp_avg", 0}, 3, Dtype::kBFloat16),
      0);
  EXPECT_EQ(error_of_squares(reference, {1, RecordKind::kOptimizer, "v.exp_avg_sq", 0}, 3,
                             Dtype::kBFloat16),
            0);
}

TEST(ErrorOfSquares, MomentsOfAnAcceptedGradientConformAndOthersDiverge) {
  const at::Tensor one = at::zeros({20}).index_fill_(0, at::tensor({0L}), 1.0F);
  const double allowed = 3 * reference_of_moments().response(kGradient)->relative_error;
  const double peak =
      norm_of(AdamMoments{}.gradient) / std::fabs(AdamMoments{}.gradient[0].item<double>());
  AdamMoments within, beyond;
  within.gradient = within.gradient * (1 + 0.9 * allowed * peak * one);
  within.moment = within.gradient.square() * 0.001;
  beyond.moment = within.moment * 1.3;

  EXPECT_EQ(status_of(within), Status::kConforms);
  EXPECT_EQ(status_of(beyond), Status::kDiverges);
}

// A query that sees one key has no gradient in exact arithmetic; whether a kernel's two sums cancel
// to 0 depends on their values.
TEST(CancellationNoise, NoiseAroundZeroConformsIsListedAndMoreThanNoiseDiverges) {
  AdamMoments noisy, wrong;
  noisy.query = values({20}, 9) * 1e-10;
  wrong.query = values({20}, 9) * 1e-8;

  EXPECT_EQ(status_of(noisy), Status::kConforms);
  EXPECT_EQ(status_of(wrong), Status::kDiverges);
  const Reference reference = reference_of_moments();
  for (const TensorComparison& t :
       judge(reference, run(MeshShape(), &reference, noisy.body()), bf16_options()).tensors)
    EXPECT_EQ(t.insensitive, t.key.name == "query") << t.key.name;
}

TEST(CancellationNoise, IsMeasuredByTheLargestTensorOfItsKindAndSquaredForSquares) {
  const Reference reference = reference_of_moments();
  const double share = 3 * 0x1p-24;

  EXPECT_NEAR(cancellation_noise(reference, {0, RecordKind::kActivationGrad, "query", 0}, 3,
                                 Dtype::kBFloat16),
              share * norm_of(values({20}, 5) * 1e-3), 1e-15);
  EXPECT_NEAR(cancellation_noise(reference, kMoment, 3, Dtype::kBFloat16),
              share * share * norm_of(AdamMoments{}.moment), 1e-18);
  EXPECT_EQ(cancellation_noise(reference, {1, RecordKind::kGrad, "w", 0}, 3, Dtype::kBFloat16), 0)
      << "another step";
}

/// A head of 4 rows and 5 outputs in fp32. Runs with moved weights move its output and the gradient
/// there, and by chance neither the bias's gradient nor the loss.
struct Head {
  at::Tensor output = values({4, 5}, 11);
  at::Tensor at_output = (values({4, 5}, 12).sign() + 0.1 * values({4, 5}, 14)) * 1e-2;
  at::Tensor weight = values({5}, 13), bias = at::zeros({5});
  double loss = 1;

  Head() { bias = at_output.sum(0); }
  Body body() const {
    return [*this](Sink& sink, int) {
      (void)sink.on_activation(site(RecordKind::kActivation, "head", layout_of({4, 5})), output);
      sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                     at::full({1}, loss, at::kDouble));
      (void)sink.on_activation_grad(site(RecordKind::kActivationGrad, "head", layout_of({4, 5})),
                                    at_output);
      sink.on_record(site(RecordKind::kGrad, "head.weight", layout_of({5})), weight);
      sink.on_record(site(RecordKind::kGrad, "head.bias", layout_of({5})), bias);
      sink.on_record(site(RecordKind::kOptimizer, "head.bias.exp_avg", layout_of({5})), bias);
      sink.on_record(site(RecordKind::kOptimizer, "head.bias.exp_avg_sq", layout_of({5})),
                     bias.square());
    };
  }
};

Reference reference_of(const Head& head) {
  return reference(head.body(), [head](int i) {
    Head moved = head;
    moved.output = moved.output * (1 + 1e-6 * values({4, 5}, 60 + i));
    moved.at_output = moved.at_output * (1 + 1e-6 * values({4, 5}, 70 + i));
    moved.weight = moved.weight * (1 + 1e-6 * values({5}, 80 + i));
    return moved.body();
  });
}

Verdict judged(const Reference& reference, const Head& head) {
  return judge(reference, run(MeshShape(), &reference, head.body()), JudgePolicy());
}

TEST(ErrorOfSummedRows, IsTheErrorOfTheRowsOverTheNormOfTheirSum) {
  const Head head;
  const Reference reference = reference_of(head);
  const Response& rows = *reference.response({0, RecordKind::kActivationGrad, "head", 0});
  const auto error = [&](RecordKind kind, const char* name, Dtype coarsest) {
    return error_of_neighbours(reference, {0, kind, name, 0}, 3, coarsest);
  };

  const double wanted = responses_allowed(3, Dtype::kFloat32) * rows.relative_error *
                        norm_of(head.at_output) / norm_of(head.bias);

  EXPECT_NEAR(error(RecordKind::kGrad, "head.bias", Dtype::kFloat32), wanted, 1e-6 * wanted);
  EXPECT_NEAR(error(RecordKind::kOptimizer, "head.bias.exp_avg", Dtype::kFloat32), wanted,
              1e-6 * wanted);
  EXPECT_NEAR(error(RecordKind::kOptimizer, "head.bias.exp_avg_sq", Dtype::kFloat32), 2 * wanted,
              1e-3 * wanted);
  EXPECT_EQ(
      error_of_summed_rows(reference, {0, RecordKind::kGrad, "head.weight", 0}, 3, Dtype::kFloat32),
      0);
  EXPECT_EQ(
      error_of_summed_rows(reference, {0, RecordKind::kGrad, "head.bias", 0}, 3, Dtype::kBFloat16),
      0);
}

TEST(ErrorOfFewElements, IsThatOfTheTensorItselfInSixteenBits) {
  const Reference reference = reference_of(Head());
  const RecordKey bias{0, RecordKind::kGrad, "head.bias", 0};
  const Response& response = *reference.response(bias);
  const double peak = response.reference_max_abs / response.reference_norm;
  const double few = few_elements_factor(std::llround(1 / (peak * peak)));
  ASSERT_GT(few, 1.1);

  EXPECT_DOUBLE_EQ(error_of_neighbours(reference, bias, 3, Dtype::kBFloat16),
                   3 * few * response.relative_error);
  EXPECT_EQ(error_of_neighbours(reference, {0, RecordKind::kOptimizer, "head.bias.exp_avg_sq", 0},
                                3, Dtype::kBFloat16),
            0);
}

TEST(ErrorOfSummedRows, ABiasConformsWithinItAndDivergesOutside) {
  const Reference reference = reference_of(Head());
  const double error =
      error_of_neighbours(reference, {0, RecordKind::kGrad, "head.bias", 0}, 3, Dtype::kFloat32);
  for (const double share : {0.5, 2.0}) {
    Head head;
    head.bias =
        head.bias + share * error * head.bias.norm() * at::tensor({1.0F, 0.0F, 0.0F, 0.0F, 0.0F});
    EXPECT_EQ(judged(reference, head).status, share < 1 ? Status::kConforms : Status::kDiverges);
  }
}

/// A step of SGD that adds as much to the parameter as it was. Runs with moved weights move the
/// gradient, and by chance not the parameter.
struct Descent {
  at::Tensor gradient = values({20}, 15).sign() + 0.1 * values({20}, 16);
  at::Tensor buffer = gradient.clone(), before = -0.5 * gradient.clone();
  at::Tensor after = before - 0.5 * gradient;

  Body body(bool has_momentum) const {
    return [*this, has_momentum](Sink& sink, int) {
      sink.on_record(site(RecordKind::kParam, "w", kVector), before);
      sink.on_record(site(RecordKind::kGrad, "w", kVector), gradient);
      if (has_momentum)
        sink.on_record(site(RecordKind::kOptimizer, "w.momentum_buffer", kVector), buffer);
      sink.on_record(site(RecordKind::kParam, "w", kVector), after);
    };
  }
};

TEST(ErrorOfStep, IsThatOfWhatIsSteppedWithAsFarAsTheStepMakesUpTheParameter) {
  for (const bool has_momentum : {false, true}) {
    const Reference reference = synthetic::reference(Descent().body(has_momentum), [=](int i) {
      Descent moved;
      moved.gradient = moved.gradient * (1 + 1e-5 * values({20}, 90 + i));
      if (has_momentum) moved.buffer = moved.gradient.clone();
      return moved.body(has_momentum);
    });
    const RecordKey after{0, RecordKind::kParam, "w", 1};
    const double wanted = 0.5 * responses_allowed(3, Dtype::kFloat32) *
                          reference.response({0, RecordKind::kGrad, "w", 0})->relative_error;

    const double error = error_of_neighbours(reference, after, 3, Dtype::kFloat32);

    EXPECT_NEAR(error, wanted, 1e-3 * wanted);
    EXPECT_EQ(error_of_neighbours(reference, {0, RecordKind::kParam, "w", 0}, 3, Dtype::kFloat32),
              0)
        << "what the step begins with";
    for (const double share : {0.5, 2.0}) {
      Descent wrong;
      wrong.after = wrong.after + share * error * wrong.after.norm() * at::eye(20)[3];
      const Verdict verdict =
          judge(reference, run(MeshShape(), &reference, wrong.body(has_momentum)), JudgePolicy());
      EXPECT_EQ(verdict.status, share < 1 ? Status::kConforms : Status::kDiverges)
          << verdict.reason;
    }
  }
}

TEST(ErrorOfLoss, IsTheErrorOfTheLogitsTimesTheGradientThere) {
  const Head head;
  const Reference reference = reference_of(head);
  const Response& logits = *reference.response({0, RecordKind::kActivation, "head", 0});
  const RecordKey loss{0, RecordKind::kScalar, "loss", 0};

  const double moved = responses_allowed(3, Dtype::kFloat32) * logits.relative_error *
                       norm_of(head.output) * norm_of(head.at_output) * 4 / std::sqrt(20.0);
  const double rounded = 0x1p-23 * std::max(1.0, logits.reference_max_abs);

  EXPECT_NEAR(error_of_loss(reference, loss, 3, Dtype::kFloat32), moved + rounded, 1e-6 * moved);
  EXPECT_EQ(error_of_loss(reference, loss, 3, Dtype::kBFloat16), 0);
  EXPECT_EQ(error_of_loss(reference, {0, RecordKind::kGrad, "head.bias", 0}, 3, Dtype::kFloat32),
            0);
}

TEST(ErrorOfLoss, ALossConformsWithinItAndDivergesOutsideAndIsNoiseNearZero) {
  for (const double size : {1.0, 1e-6}) {
    Head head;
    head.loss = size;
    const Reference reference = reference_of(head);
    const double error =
        error_of_loss(reference, {0, RecordKind::kScalar, "loss", 0}, 3, Dtype::kFloat32);
    for (const double share : {0.5, 2.0}) {
      Head other = head;
      other.loss += share * error;
      const Verdict verdict = judged(reference, other);
      EXPECT_EQ(verdict.status, share < 1 ? Status::kConforms : Status::kDiverges)
          << size << ": " << verdict.reason;
    }
  }
}

}  // namespace
}  // namespace isoshard
