// SPDX-License-Identifier: Apache-2.0
// Parameters after the steps of AdamW where the reference's gradient is noise: whatever is wrong
// there diverges, and a correct run with other noise conforms.
#include "harness/trace/masked_steps.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/base/philox.h"
#include "harness/judge/judge.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/judged_share.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kRate = 0.01, kDecay = 1, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8;
constexpr std::int64_t kRows = 12, kWidth = 16;

/// What two steps of AdamW make of a table of which no token reads rows 5, 6 and 11, of a matrix of
/// which three elements have gradients of noise, and of a bias that is noise alone.
struct Model {
  at::ScalarType dtype = at::kFloat;
  std::vector<at::Tensor> read, tables, matrices, biases;  ///< before, and after each step
  std::vector<at::Tensor> table_gradients, matrix_gradients, bias_gradients;
  std::vector<at::Tensor> table_first, table_second;  ///< moments of the table
};

struct Moments {
  at::Tensor first, second;
};

at::Tensor stepped(const at::Tensor& before, const at::Tensor& gradient, Moments& moments, int t) {
  const at::Tensor g = gradient.to(at::kDouble);
  moments.first =
      moments.first.defined() ? moments.first * kBeta1 + g * (1 - kBeta1) : g * (1 - kBeta1);
  moments.second = moments.second.defined() ? moments.second * kBeta2 + g * g * (1 - kBeta2)
                                            : g * g * (1 - kBeta2);
  const at::Tensor m = moments.first / (1 - std::pow(kBeta1, t)),
                   v = moments.second / (1 - std::pow(kBeta2, t));
  return (before.to(at::kDouble) * (1 - kRate * kDecay) - kRate * m / (v.sqrt() + kEps))
      .to(before.scalar_type());
}

/// `noise` tells apart runs that differ by roundings.
Model model_of(int noise, at::ScalarType dtype = at::kFloat) {
  Model model;
  model.dtype = dtype;
  model.tables = {values({kRows, kWidth}, 1, dtype)};
  model.matrices = {values({6, 8}, 2, dtype)};
  model.biases = {values({12}, 3, dtype)};
  const double roundings = dtype == at::kBFloat16 ? 1e-3 : 1e-9;
  const double size_of_noise = dtype == at::kBFloat16 ? 1e-2 : 1e-7;
  Moments table, matrix, bias;
  for (int step = 0; step < 2; ++step) {
    const auto noisy = [&](const Shape& shape, int seed) {
      return values(shape, seed + 10 * step) +
             roundings * values(shape, 100 * (noise + 1) + seed + step);
    };
    at::Tensor g = noisy({kRows, kWidth}, 4);
    for (const int row : {5, 6, 11}) g[row] = 0.0;
    at::Tensor h = noisy({6, 8}, 5);
    for (const int i : {3, 20, 41})
      h.view({-1})[i] = size_of_noise * values({1}, 300 * (noise + 1) + i + step)[0].item<double>();
    at::Tensor b = size_of_noise * values({12}, 500 * (noise + 1) + step);
    model.table_gradients.push_back(g.to(dtype));
    model.matrix_gradients.push_back(h.to(dtype));
    model.bias_gradients.push_back(b.to(dtype));
    model.tables.push_back(stepped(model.tables.back(), g.to(dtype), table, step + 1));
    model.matrices.push_back(stepped(model.matrices.back(), h.to(dtype), matrix, step + 1));
    model.biases.push_back(stepped(model.biases.back(), b.to(dtype), bias, step + 1));
    model.table_first.push_back(table.first.to(dtype));
    model.table_second.push_back(table.second.to(dtype));
  }
  return model;
}

/// The table is split over tp, the rest is on every rank.
Body body_of(const Model& model, bool whole) {
  return [model, whole](Sink& sink, int rank) {
    const int tp = whole ? 0 : rank % 3;
    const auto cut = [&](const at::Tensor& t) {
      return whole ? t : t.narrow(0, tp * kRows / 3, kRows / 3);
    };
    const auto table = [&](RecordKind kind, const std::string& name, const at::Tensor& value) {
      sink.on_record(site(kind, name, layout_of({kRows, kWidth}, {shard(Axis::kTp, 0)})),
                     cut(value));
    };
    const auto same = [&](RecordKind kind, const char* name, const at::Tensor& value) {
      sink.on_record(site(kind, name, layout_of(value.sizes().vec())), value);
    };
    const auto parameters = [&](std::size_t i) {
      table(RecordKind::kParam, "table", model.tables[i]);
      same(RecordKind::kParam, "matrix", model.matrices[i]);
      same(RecordKind::kParam, "bias", model.biases[i]);
    };
    for (std::size_t step = 0; step < 2; ++step) {
      sink.begin_step(static_cast<int>(step));
      if (step == 0) parameters(0);
      same(RecordKind::kDataId, "input_ids",
           at::tensor({0, 1, 2, 3, 4, 7, 8, 9, 10, 0}, at::kLong).reshape({5, 2}));
      table(RecordKind::kGrad, "table", model.table_gradients[step]);
      same(RecordKind::kGrad, "matrix", model.matrix_gradients[step]);
      same(RecordKind::kGrad, "bias", model.bias_gradients[step]);
      same(RecordKind::kScalar, "learning_rate", at::tensor({kRate}, at::kDouble));
      table(RecordKind::kOptimizer, "table.exp_avg", model.table_first[step]);
      table(RecordKind::kOptimizer, "table.exp_avg_sq", model.table_second[step]);
      parameters(step + 1);
    }
  };
}

JudgePolicy policy_of(at::ScalarType dtype) {
  JudgePolicy policy = with_unused_axes();
  policy.mask = true;
  policy.coarsest = dtype == at::kBFloat16 ? Dtype::kBFloat16 : Dtype::kFloat32;
  policy.step_rule = StepRule{kRate, kDecay, kBeta1, kBeta2, kEps};
  return policy;
}

const Reference& reference_in(at::ScalarType dtype) {
  const auto make = [](at::ScalarType type) {
    return reference(
        body_of(model_of(0, type), true),
        [type](int run) { return body_of(model_of(run + 1, type), true); }, 3, policy_of(type));
  };
  static const Reference fp32 = make(at::kFloat), bf16 = make(at::kBFloat16);
  return dtype == at::kBFloat16 ? bf16 : fp32;
}

/// A run with noise of its own, after `change` on each rank.
Verdict verdict_of(
    const std::function<void(Model&, int rank)>& change = [](Model&, int) {},
    at::ScalarType dtype = at::kFloat) {
  const Reference& r = reference_in(dtype);
  const JudgePolicy policy = policy_of(dtype);
  const Trace trace = run(
      kDp2Tp3, &r,
      [&](Sink& sink, int rank) {
        Model model = model_of(9, dtype);
        // Replicas are equal; the noise of one run is the noise of all its ranks.
        for (std::vector<at::Tensor>* list :
             {&model.tables, &model.matrices, &model.biases, &model.table_gradients,
              &model.table_first, &model.table_second}) {
          for (at::Tensor& t : *list) t = t.clone();
        }
        change(model, rank);
        body_of(model, false)(sink, rank);
      },
      Keep::kWhatDiffers, policy);
  return judge(r, trace, policy);
}

TEST(MaskedSteps, ACorrectRunWithOtherNoiseConforms) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Verdict verdict = verdict_of([](Model&, int) {}, dtype);

    EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
    EXPECT_EQ(verdict.mesh.world_size(), 6);
    EXPECT_LT(verdict.judged.least, 0.1) << "the bias is noise";
    EXPECT_THAT(verdict.judged.least_tensor, HasSubstr("bias"));
    for (const TensorComparison& t : verdict.tensors) {
      if (t.key.name == "table" && t.stage == Stage::kParameterAfterStep) {
        EXPECT_TRUE(t.sharded);
        EXPECT_LT(t.stats.numel, t.elements - 3 * kWidth + 1) << "unread rows are not compared,";
        EXPECT_GE(t.unmasked_share, 0.25) << "but judged";
      }
    }
  }
}

struct Attack {
  const char* what;
  std::function<void(Model&, int rank)> change;
};

std::vector<Attack> attacks() {
  std::vector<Attack> all;
  const auto element = [](at::Tensor& t, std::int64_t i) { return t.view({-1})[i]; };
  for (const std::size_t step : {1, 2}) {
    for (const double bad : {kNan, kInf, -kInf, 1e30, -1e30, 0.3}) {
      all.push_back({"noise of the matrix",
                     [=](Model& m, int) { element(m.matrices[step], 20).fill_(bad); }});
      all.push_back(
          {"bias of noise alone", [=](Model& m, int) { element(m.biases[step], 7).fill_(bad); }});
      all.push_back({"bias on one rank", [=](Model& m, int rank) {
                       if (rank == 4) element(m.biases[step], 7).fill_(bad);
                     }});
      all.push_back({"unread row", [=](Model& m, int) { m.tables[step][5].fill_(bad); }});
      all.push_back({"unread row on one rank", [=](Model& m, int rank) {
                       if (rank == 5) m.tables[step][11][3].fill_(bad);
                     }});
    }
    all.push_back({"flipped bias", [=](Model& m, int) { m.biases[step].neg_(); }});
    all.push_back({"bias of zeros", [=](Model& m, int) { m.biases[step].zero_(); }});
    all.push_back(
        {"bias rolled", [=](Model& m, int) { m.biases[step].copy_(m.biases[step].roll(1)); }});
    all.push_back({"flipped element of the matrix",
                   [=](Model& m, int) { element(m.matrices[step], 41).neg_(); }});
    all.push_back({"unread row without decay",
                   [=](Model& m, int) { m.tables[step][6].copy_(m.tables[step - 1][6]); }});
    all.push_back({"unread row of zeros", [=](Model& m, int) { m.tables[step][6].zero_(); }});
    all.push_back({"unread row with another row's values",
                   [=](Model& m, int) { m.tables[step][6].copy_(m.tables[step][5]); }});
    all.push_back({"unread row one ulp away", [=](Model& m, int) {
                     const double up = m.dtype == at::kBFloat16 ? 1 + 0x1p-7 : 1 + 0x1p-23;
                     m.tables[step][6][2].mul_(up);
                   }});
    all.push_back(
        {"unread row moved by a step", [=](Model& m, int) { m.tables[step][6].sub_(kRate); }});
    for (const double bad : {1e-12, kNan}) {
      all.push_back({"first moment of an unread row",
                     [=](Model& m, int) { m.table_first[step - 1][5][1].fill_(bad); }});
      all.push_back({"second moment of an unread row",
                     [=](Model& m, int) { m.table_second[step - 1][11][0].fill_(bad); }});
      all.push_back({"gradient of an unread row",
                     [=](Model& m, int) { m.table_gradients[step - 1][11][0].fill_(bad); }});
    }
  }
  return all;
}

TEST(MaskedSteps, WhateverIsWrongOutsideTheMaskDiverges) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Attack& attack : attacks()) {
      const Verdict verdict = verdict_of(attack.change, dtype);

      EXPECT_EQ(verdict.status, Status::kDiverges) << attack.what << " in " << dtype;
    }
  }
}

TEST(MaskedSteps, NamesTheElementTheRankAndWhatWasAllowed) {
  const Verdict moved = verdict_of([](Model& m, int rank) {
    if (rank == 4) m.biases[1].view({-1})[7] = 0.5;
  });
  const Verdict unread = verdict_of([](Model& m, int) { m.tables[1][6][2] = 0.25; });

  ASSERT_EQ(moved.findings.size(), 2U);
  EXPECT_EQ(moved.findings[0].stage, Stage::kReplicaDrift) << "copies differ, too";
  const Finding& step = moved.findings[1];
  EXPECT_THAT(step, FindingIs(FindingId::kMaskedElementMovedTooFar,
                              {{"rank", 4}, {"index", std::vector{7}}, {"actual", 0.5}}));
  EXPECT_LT(number_of(step.measured, "allowed_step").value_or(1), 0.1);
  EXPECT_THAT(step.ranks, testing::ElementsAre(4));
  EXPECT_TRUE(step.confirmed);
  ASSERT_FALSE(unread.findings.empty());
  EXPECT_THAT(unread.findings[0],
              FindingIs(FindingId::kUntouchedElementMoved, {{"index", std::vector{6, 2}}}));
  EXPECT_THAT(unread.findings[0].ranks, testing::ElementsAre(1, 4)) << "tp 1 holds rows 4 to 7";
}

TEST(MaskedSteps, WithoutARuleEveryFiniteStepPassesAndNoOther) {
  const Reference& r = reference_in(at::kFloat);
  JudgePolicy policy = policy_of(at::kFloat);
  policy.step_rule.reset();
  const auto said = [&](double value) {
    const Trace trace = run(
        MeshShape(), &r,
        [&](Sink& sink, int rank) {
          Model model = model_of(9);
          model.biases[1] = model.biases[1].clone();
          model.biases[1][7] = value;
          body_of(model, true)(sink, rank);
        },
        Keep::kWhatDiffers, policy);
    return judge(r, trace, policy).status;
  };

  EXPECT_EQ(said(0.9), Status::kConforms);
  EXPECT_EQ(said(kNan), Status::kDiverges);
  EXPECT_EQ(said(kInf), Status::kDiverges);
}

/// The ratio that a sequence of gradients gives.
double ratio_of(const std::vector<double>& gradients, double beta1, double beta2) {
  double m = 0, v = 0;
  for (const double g : gradients) {
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
  }
  const auto t = static_cast<double>(gradients.size());
  return std::fabs(m / (1 - std::pow(beta1, t))) / std::sqrt(v / (1 - std::pow(beta2, t)));
}

TEST(AdamRatio, NoGradientsGiveMoreAndTheWorstGiveAsMuch) {
  for (const auto& [beta1, beta2] :
       {std::pair(0.9, 0.999), std::pair(0.9, 0.95), std::pair(0.0, 0.99), std::pair(0.5, 0.3)}) {
    for (const int updates : {1, 2, 3, 10, 60}) {
      const double bound = largest_adam_ratio(beta1, beta2, updates);
      const RandomStream stream(7, "ratio");
      for (int draw = 0; draw < 50; ++draw) {
        std::vector<double> gradients;
        for (int t = 0; t < updates; ++t) {
          const auto bits = stream.bits(static_cast<std::uint64_t>(100 * draw + t));
          gradients.push_back(std::ldexp(static_cast<double>(bits >> 40U), -20) - 8);
        }
        EXPECT_LE(ratio_of(gradients, beta1, beta2), bound * (1 + 1e-12));
      }
      // Cauchy-Schwarz is an equality for gradients that grow by beta1 / beta2 backwards in time.
      std::vector<double> worst;
      for (int t = 1; t <= updates; ++t) worst.push_back(std::pow(beta1 / beta2, updates - t));
      const double reached = ratio_of(worst, beta1, beta2);
      EXPECT_LE(reached, bound * (1 + 1e-12));
      double largest = reached;
      for (int t = 1; t < updates; ++t) {
        std::vector<double> shorter(worst.end() - t, worst.end());
        largest = std::max(largest, ratio_of(shorter, beta1, beta2));
      }
      EXPECT_NEAR(largest, bound, 1e-9 * bound) << beta1 << ' ' << beta2 << ' ' << updates;
    }
  }
  EXPECT_EQ(largest_adam_ratio(0.9, 0.999, 1), 1);
  EXPECT_LT(largest_adam_ratio(0.9, 0.999, 100000), 7.28);
  EXPECT_EQ(largest_adam_ratio(0.9, 0, 2), kInf) << "no memory of squares bounds nothing";
}

}  // namespace
}  // namespace isoshard
