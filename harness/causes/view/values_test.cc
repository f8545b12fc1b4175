// SPDX-License-Identifier: Apache-2.0
// The operations of a diagnosis on numbers that are known beforehand.
#include "harness/causes/view/values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/base/error.h"

namespace isoshard::detail {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

/// 0, 1, 2, ... in row-major order.
Values counted(const Shape& shape) {
  std::vector<double> numbers(static_cast<std::size_t>(numel_of(shape)));
  std::iota(numbers.begin(), numbers.end(), 0);
  return {shape, std::move(numbers)};
}

std::vector<double> numbers_in(const Values& values) {
  const Values own = values.contiguous();
  return {own.flat().begin(), own.flat().end()};
}

TEST(Values, PartsAreViewsInPlace) {
  const Values x = counted({2, 3, 4});

  EXPECT_THAT(numbers_in(x.narrow(1, 1, 2).narrow(2, 0, 2)),
              ElementsAre(4, 5, 8, 9, 16, 17, 20, 21));
  EXPECT_THAT(numbers_in(x.cut({1, 2, 3}, {1, 1, 1})), ElementsAre(23));
  EXPECT_FALSE(x.narrow(1, 1, 2).is_contiguous());
  EXPECT_TRUE(x.narrow(0, 1, 1).is_contiguous());
  EXPECT_THAT(x.to_front(1).shape(), ElementsAre(3, 2, 4));
  EXPECT_THAT(numbers_in(x.to_front(2).narrow(0, 3, 1)), ElementsAre(3, 7, 11, 15, 19, 23));
  EXPECT_THAT(numbers_in(counted({2, 3}).transposed()), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(x.reshape({-1, 4}).shape(), ElementsAre(6, 4));
  EXPECT_THAT(numbers_in(counted({4, 2}).take(std::vector<std::int64_t>{3, 0})),
              ElementsAre(6, 7, 0, 1));
}

TEST(Values, OperationsRepeatWhatIsMissing) {
  const Values x = counted({2, 3}), row({3}, {10, 20, 30}), column({2, 1}, {1, 2});

  EXPECT_THAT(numbers_in(x + row), ElementsAre(10, 21, 32, 13, 24, 35));
  EXPECT_THAT(numbers_in(x * column), ElementsAre(0, 1, 2, 6, 8, 10));
  EXPECT_THAT(numbers_in(x.transposed() - x.transposed()), ElementsAre(0, 0, 0, 0, 0, 0));
  EXPECT_THAT(numbers_in(2 * x / 4 - 1), ElementsAre(-1, -0.5, 0, 0.5, 1, 1.5));
  EXPECT_THROW((void)(x + column.reshape({2})), ShapeError);
}

TEST(Values, SumsAreThoseOfTheNumbers) {
  const Values x = counted({3, 1000});

  EXPECT_EQ(x.sum(), 2999 * 3000 / 2);
  EXPECT_EQ(x.narrow(1, 0, 2).sum(), 0 + 1 + 1000 + 1001 + 2000 + 2001);
  EXPECT_THAT(numbers_in(counted({2, 3}).sum(0)), ElementsAre(3, 5, 7));
  EXPECT_THAT(numbers_in(counted({2, 3}).mean(1)), ElementsAre(1, 4));
  EXPECT_EQ(dot(counted({4}), counted({4})), 14);
  EXPECT_EQ(distance(counted({2, 2}), Values::zeros({2, 2}) - 1), std::sqrt(1 + 4 + 9 + 16));
  EXPECT_EQ(x.min(), 0);
  EXPECT_EQ(x.max(), 2999);
}

TEST(Values, PartsAreJoinedAlongAnyDim) {
  const Values x = counted({2, 2, 2});

  for (std::int64_t dim = 0; dim < 3; ++dim) {
    const std::vector<Values> parts = {x.narrow(dim, 0, 1), x.narrow(dim, 1, 1)};
    EXPECT_TRUE(equal(concatenated(parts, dim), x)) << dim;
  }
  EXPECT_THAT(numbers_in(stacked(std::vector{counted({2}), counted({1, 2})})),
              ElementsAre(0, 1, 0, 1));
}

TEST(Values, ProductsTakeViews) {
  const Values a = counted({2, 3}), b = counted({4, 3}).transposed().narrow(1, 1, 2);

  EXPECT_THAT(numbers_in(product(a, b)), ElementsAre(14, 23, 50, 86));
  EXPECT_THROW((void)product(a, a), ShapeError);
}

TEST(Values, BestWeightsAreFoundAndTheSmallestOfEquallyGoodOnes) {
  const Values rows({2, 3}, {1, 0, 2, 0, 1, -1});
  EXPECT_THAT(best_weights(rows, weighted_sum(rows, std::vector<double>{3, -2})),
              ElementsAre(DoubleNear(3, 1e-12), DoubleNear(-2, 1e-12)));

  const Values alike({2, 2}, {1, 2, 1, 2});
  EXPECT_THAT(best_weights(alike, Values({2}, {2, 4})),
              ElementsAre(DoubleNear(1, 1e-12), DoubleNear(1, 1e-12)));
}

TEST(Values, NearestRowsAreTheFirstOfEquallyNearOnes) {
  const Values among({3, 2}, {0, 0, 5, 5, 0, 0});

  EXPECT_THAT(nearest_rows(Values({2, 2}, {4, 4, 1, 0}), among), ElementsAre(1, 0));
}

TEST(Values, EqualityIsOfValuesAndShapes) {
  const double nan = std::numeric_limits<double>::quiet_NaN();

  EXPECT_TRUE(equal(Values({1}, {-0.0}), Values({1}, {0.0})));
  EXPECT_FALSE(equal(Values({1}, {nan}), Values({1}, {nan})));
  EXPECT_FALSE(equal(counted({2, 2}), counted({4})));
}

}  // namespace
}  // namespace isoshard::detail
