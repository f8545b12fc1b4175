// SPDX-License-Identifier: Apache-2.0
// The ops against formulas written out in loops, and their precision in bf16.
#include "subjects/model/ops/ops.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/base/error.h"

namespace isoshard {
namespace {

at::Tensor random(at::IntArrayRef shape, std::uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble));
}

double max_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(RmsNorm, IsTheFormulaInFp64) {
  const at::Tensor x = random({3, 5}, 1), weight = random({5}, 2);

  const at::Tensor actual = rms_norm(x, weight, 1e-2);

  for (std::int64_t i = 0; i < 3; ++i) {
    double sum = 0;
    for (std::int64_t j = 0; j < 5; ++j) sum += std::pow(x[i][j].item<double>(), 2);
    const at::Tensor expected = weight * x[i] / std::sqrt(sum / 5 + 1e-2);
    EXPECT_LE(max_difference(actual[i], expected), 1e-15);
  }
}

TEST(RmsNorm, RoundsToTheDtypeBeforeTheWeightIsMultiplied) {
  const at::Tensor x = random({4, 64}, 3).to(at::kBFloat16),
                   weight = random({64}, 4).to(at::kBFloat16);
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor quotient = wide * at::rsqrt(wide.pow(2).mean(-1, true) + 1e-6);

  const at::Tensor actual = rms_norm(x, weight, 1e-6);

  EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(actual, weight * quotient.to(at::kBFloat16)));
  EXPECT_FALSE(at::equal(actual, (weight.to(at::kFloat) * quotient).to(at::kBFloat16)))
      << "the case cannot tell the two orders apart";
}

TEST(LayerNorm, IsTheFormulaInFp64) {
  const at::Tensor x = random({3, 5}, 1), weight = random({5}, 2), bias = random({5}, 3);

  const at::Tensor actual = layer_norm(x, weight, bias, 1e-2);

  const at::Tensor centred = x - x.mean(-1, true);
  EXPECT_LE(max_difference(
                actual, centred / centred.pow(2).mean(-1, true).add(1e-2).sqrt() * weight + bias),
            1e-14);
}

TEST(GeluNew, IsTheTanhFormulaAndNotTheKernelsRounding) {
  const at::Tensor x = random({1000}, 1);
  const at::Tensor bf16 = x.to(at::kBFloat16);

  EXPECT_LE(max_difference(gelu_new(x), at::gelu(x, "tanh")), 1e-14);
  EXPECT_GT(max_difference(gelu_new(x), at::gelu(x)), 1e-5)
      << "the case cannot tell it from the exact one";
  EXPECT_EQ(gelu_new(bf16).scalar_type(), at::kBFloat16);
  EXPECT_FALSE(at::equal(gelu_new(bf16), at::gelu(bf16, "tanh"))) << "each op is rounded to bf16";
}

TEST(Rotary, Llama3SlowsLongWavesAndKeepsShortOnes) {
  const RopeConfig plain{"default", 1e4}, scaled{"llama3", 1e4, 8.0, 1.0, 4.0, 256};

  const RotaryTables before = rotary_tables(plain, 32, 2, at::kDouble),
                     after = rotary_tables(scaled, 32, 2, at::kDouble);

  for (std::int64_t pair = 0; pair < 16; ++pair) {
    const double frequency = std::pow(1e4, -static_cast<double>(pair) / 16),
                 turns = 256 * frequency / (2 * 3.14159265358979);
    const double slow = after.sin_SD[1][pair].item<double>(),
                 fast = before.sin_SD[1][pair].item<double>();
    if (turns > 4) {
      EXPECT_EQ(slow, fast) << pair;
    } else if (turns < 1) {
      EXPECT_NEAR(slow, std::sin(frequency / 8), 1e-9) << pair;
    } else {
      EXPECT_TRUE(slow < fast && slow > std::sin(frequency / 8)) << pair;
    }
  }
}

TEST(Rotary, TurnsEachPairByPositionTimesFrequency) {
  const RopeConfig rope{"default", 100.0};
  const RotaryTables tables = rotary_tables(rope, 6, 4, at::kDouble);
  const at::Tensor x = random({1, 1, 4, 6}, 5);

  const at::Tensor turned = apply_rotary(x, tables)[0][0];

  for (std::int64_t position = 0; position < 4; ++position) {
    for (std::int64_t pair = 0; pair < 3; ++pair) {
      const double angle =
          static_cast<double>(position) * std::pow(100.0, -2.0 * static_cast<double>(pair) / 6);
      const double a = x[0][0][position][pair].item<double>(),
                   b = x[0][0][position][pair + 3].item<double>();
      EXPECT_NEAR(turned[position][pair].item<double>(), a * std::cos(angle) - b * std::sin(angle),
                  1e-6);
      EXPECT_NEAR(turned[position][pair + 3].item<double>(),
                  b * std::cos(angle) + a * std::sin(angle), 1e-6);
    }
  }
}

TEST(Rotary, FrequenciesAreFp32ValuesInEveryDtype) {
  const RopeConfig rope{"default", 1e6};

  const RotaryTables fp64 = rotary_tables(rope, 16, 400, at::kDouble),
                     fp32 = rotary_tables(rope, 16, 400, at::kFloat);

  // Frequencies that differ in the 24th bit would make angles of 399 differ by 1e-5.
  const double frequency =
      static_cast<double>(static_cast<float>(1.0F / std::pow(1e6F, 2.0F / 16.0F)));
  EXPECT_NEAR(fp64.sin_SD[399][1].item<double>(), std::sin(399 * frequency), 1e-12);
  EXPECT_LE(max_difference(fp64.cos_SD, fp32.cos_SD.to(at::kDouble)), 4e-5);
}

TEST(Rotary, TablesAreRoundedOnceToTheDtype) {
  const RopeConfig rope{"default", 1e4};

  const RotaryTables fp32 = rotary_tables(rope, 8, 32, at::kFloat),
                     bf16 = rotary_tables(rope, 8, 32, at::kBFloat16);

  EXPECT_TRUE(at::equal(bf16.cos_SD, fp32.cos_SD.to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(bf16.sin_SD, fp32.sin_SD.to(at::kBFloat16)));
}

TEST(RepeatKv, NeighboringQueryHeadsShareAHead) {
  const at::Tensor x = random({2, 3, 4, 5}, 6);

  const at::Tensor repeated = repeat_kv(x, 2);

  ASSERT_EQ(repeated.sizes(), at::IntArrayRef({2, 6, 4, 5}));
  for (std::int64_t head = 0; head < 6; ++head)
    EXPECT_TRUE(at::equal(repeated.select(1, head), x.select(1, head / 2))) << head;
}

class Attention : public testing::TestWithParam<AttentionImpl> {};
INSTANTIATE_TEST_SUITE_P(Impls, Attention,
                         testing::Values(AttentionImpl::kEager, AttentionImpl::kSdpa),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST_P(Attention, IsTheFormulaInFp64) {
  const at::Tensor q = random({2, 4, 5, 6}, 7), k = random({2, 2, 5, 6}, 8),
                   v = random({2, 2, 5, 6}, 9);

  const at::Tensor actual = causal_attention(q, k, v, GetParam());

  ASSERT_EQ(actual.sizes(), at::IntArrayRef({2, 5, 24}));
  EXPECT_TRUE(actual.is_contiguous());
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t head = 0; head < 4; ++head) {
      for (std::int64_t t = 0; t < 5; ++t) {
        const at::Tensor keys = k[b][head / 2].slice(0, 0, t + 1),
                         values = v[b][head / 2].slice(0, 0, t + 1);
        const at::Tensor weights = at::mv(keys, q[b][head][t]).div(std::sqrt(6.0)).exp();
        const at::Tensor expected = at::mv(values.t(), weights / weights.sum());
        EXPECT_LE(max_difference(actual[b][t].slice(0, head * 6, head * 6 + 6), expected), 1e-14)
            << b << ' ' << head << ' ' << t;
      }
    }
  }
}

TEST(AttentionSoftmax, InTheModelsDtypeHasOtherGradientsInBf16) {
  const auto gradient = [&](SoftmaxDtype softmax) {
    at::Tensor q = random({2, 3, 9, 8}, 1).to(at::kBFloat16).requires_grad_(true);
    const at::Tensor k = random({2, 3, 9, 8}, 2).to(at::kBFloat16);
    causal_attention(q, k, k, AttentionImpl::kEager, softmax).sin().sum().backward();
    return q.grad();
  };

  const at::Tensor wide = gradient(SoftmaxDtype::kWide), model = gradient(SoftmaxDtype::kModel);

  EXPECT_FALSE(at::equal(wide, model));
  EXPECT_TRUE(at::allclose(wide.to(at::kFloat), model.to(at::kFloat), 0.1, 0.1));
}

TEST_P(Attention, WorksForOneTokenAndInEveryDtype) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor q = random({1, 2, 1, 4}, 1).to(dtype), v = random({1, 2, 1, 4}, 2).to(dtype);

    EXPECT_TRUE(at::equal(causal_attention(q, q, v, GetParam()), v.transpose(1, 2).flatten(2)));
  }
}

TEST_P(Attention, RefusesHeadsThatDoNotDivide) {
  const at::Tensor q = random({1, 3, 2, 4}, 1), k = random({1, 2, 2, 4}, 2);

  EXPECT_THROW(static_cast<void>(causal_attention(q, k, k, GetParam())), ShapeError);
}

}  // namespace
}  // namespace isoshard
