// SPDX-License-Identifier: Apache-2.0
// A row-parallel product against the whole GEMM: within the
// derived bound, near it, and a lost rank is outside.
#include "suite/published/row_bound.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "core/base/error.h"
#include "harness/testing/run_world.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "suite/published/column_probe.h"
#include "suite/published/drawn.h"

namespace isoshard {
namespace {

constexpr std::int64_t kRows = 37, kTerms = 840, kOut = 65;

const Drawn kX{"x", {kRows, kTerms}, 1.0, 3}, kWeight{"weight", {kOut, kTerms}, 1.0 / 29, 3};

ShardPlan row_plan() {
  ShardPlan plan;
  plan.kinds = {{"row.weight", ShardKind::kRow}};
  return plan;
}

using Parameters3 = std::tuple<int, Dtype, ReductionOrder>;
class RowParallelProduct : public ::testing::TestWithParam<Parameters3> {};

TEST_P(RowParallelProduct, StaysWithinTheBoundAndALostRankDoesNot) {
  const auto [tp, dtype, order] = GetParam();

  const std::vector<double> shares =
      run_world<std::vector<double>>(WorldOptions{.size = tp, .order = order}, [&, degree = tp,
                                                                                type = dtype,
                                                                                sum = order](
                                                                                   Rank& rank) {
        EXPECT_EQ(rank.size(), degree);
        const at::Tensor x = kX.part(type, 1, rank.rank(), degree),
                         weight = kWeight.part(type, 1, rank.rank(), degree);
        EXPECT_EQ(x.numel() * degree, kRows * kTerms);
        const TensorParallelStrategy split(row_plan(), rank.comm(), 1, 1.0);
        const at::Tensor actual = split.linear("row", x, weight, std::nullopt, nullptr);
        const at::Tensor reference = at::linear(kX.whole(type), kWeight.whole(type));
        const at::Tensor bound =
            row_parallel_bound(kX.whole(type), kWeight.whole(type), degree, type, sum);
        const at::Tensor without_own = actual - at::linear(x, weight);
        return std::vector<double>{share_of_bound(reference, actual, bound),
                                   share_of_bound(reference, without_own, bound)};
      }).at(0);

  ASSERT_EQ(shares.size(), 2U);
  EXPECT_LE(shares[0], 1.0);
  EXPECT_GT(shares[1], 10.0) << "the negative control: one rank's partial is missing";
  // The stores of a narrow dtype make up most of its bound; the fp32 and fp64 sums come nowhere
  // near the worst case of 840 roundings.
  if (tp > 1) {
    EXPECT_GT(shares[0], dtype == Dtype::kBFloat16 ? 1.0 / 8 : 1.0 / 2000);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RowParallelProduct,
    ::testing::Combine(::testing::Values(2, 3, 4),
                       ::testing::Values(Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16),
                       ::testing::Values(ReductionOrder::kOrdered, ReductionOrder::kRing,
                                         ReductionOrder::kTree)),
    [](const auto& given) {
      return "tp" + std::to_string(std::get<0>(given.param)) + "_" +
             std::string(name_of(std::get<1>(given.param))) + "_" +
             std::string(name_of(std::get<2>(given.param)));
    });

TEST(RowBound, OfOneRankIsThatOfTwoComputationsOfTheWhole) {
  const at::Tensor x = at::ones({1, 4}), weight = at::ones({1, 4});

  const double bound =
      row_parallel_bound(x, weight, 1, Dtype::kFloat32, ReductionOrder::kRing).item<double>();

  // Twice gamma(4) of the magnitudes, 4.
  const double u = std::ldexp(1.0, -24);
  EXPECT_NEAR(bound, 2 * 4 * (4 * u / (1 - 4 * u)), 1e-15);
}

TEST(RowBound, SharesSeeNanAndExactZeros) {
  const at::Tensor zero = at::zeros({2}),
                   nan = at::full({2}, std::numeric_limits<double>::quiet_NaN());

  EXPECT_EQ(share_of_bound(zero, zero, zero), 0);
  EXPECT_EQ(share_of_bound(zero, at::ones({2}), zero), std::numeric_limits<double>::infinity());
  EXPECT_EQ(share_of_bound(zero, nan, at::ones({2})), std::numeric_limits<double>::infinity());
}

TEST(RowBound, RefusesWhatItHasNoFormulaFor) {
  const at::Tensor x = at::ones({1, 4});

  EXPECT_THROW((void)row_parallel_bound(x, x, 3, Dtype::kFloat32, ReductionOrder::kRing),
               UsageError);
  EXPECT_THROW((void)row_parallel_bound(x, x, 2, Dtype::kInt64, ReductionOrder::kRing), UsageError);
  EXPECT_THROW((void)row_parallel_bound(x, x, 2, Dtype::kFloat32, ReductionOrder::kNative),
               UsageError);
}

TEST(ColumnProbe, IsBitEqualInBf16ForEveryShape) {
  for (const int tp : {1, 2, 3, 4, 7}) {
    run_world(tp, [tp](Rank& rank) {
      ASSERT_EQ(rank.size(), tp);
      for (const ProductShape& shape : probed_shapes()) {
        if (shape.out % tp != 0) continue;
        const ColumnProbe probe = probe_column(rank, Dtype::kBFloat16, shape, 0);
        EXPECT_TRUE(probe.bit_equal()) << shape.rows << " x " << shape.in << " x " << shape.out
                                       << ": " << probe.unequal << " differ";
      }
    });
  }
}

TEST(ColumnProbe, ReportsFp32AndFp64WithinTheirRounding) {
  run_world(4, [](Rank& rank) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64}) {
      for (const ProductShape& shape : probed_shapes()) {
        const ColumnProbe probe = probe_column(rank, dtype, shape, 0);
        EXPECT_EQ(probe.bit_equal(), probe.max == 0);
        EXPECT_LE(probe.max, 1e4 * unit_roundoff(dtype))
            << "outputs are below 10, sums have at most 1024 terms";
      }
    }
  });
}

// The probe can say no: a weight that is not this rank's part is seen.
TEST(ColumnProbe, AnotherSeedsWeightIsNotEqual) {
  const Drawn x{"column.x", {7, 96}, 1.0, 0}, weight{"column.weight", {168, 96}, 1.0, 0},
      other{"column.weight", {168, 96}, 1.0, 1};

  const at::Tensor own =
      at::linear(x.whole(Dtype::kBFloat16), weight.part(Dtype::kBFloat16, 0, 1, 2));
  const at::Tensor wrong =
      at::linear(x.whole(Dtype::kBFloat16), other.part(Dtype::kBFloat16, 0, 1, 2));
  const at::Tensor whole =
      at::linear(x.whole(Dtype::kBFloat16), weight.whole(Dtype::kBFloat16)).chunk(2, 1)[1];

  EXPECT_TRUE(at::equal(own, whole));
  EXPECT_FALSE(at::equal(wrong, whole));
}

TEST(ColumnProbe, NamesATpThatDoesNotDivide) {
  EXPECT_THROW((void)(Drawn{"w", {10, 4}, 1.0, 0}.part(Dtype::kFloat32, 0, 0, 3)), UsageError);
}

}  // namespace
}  // namespace isoshard
