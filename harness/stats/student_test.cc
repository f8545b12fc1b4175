// SPDX-License-Identifier: Apache-2.0
/// Quantiles against printed tables.
#include "harness/stats/student.h"

#include <gtest/gtest.h>

namespace isoshard {
namespace {

TEST(StudentQuantile, IsThatOfTables) {
  EXPECT_NEAR(student_quantile(1, 0.5), 1, 1e-6);
  EXPECT_NEAR(student_quantile(10, 0.05), 2.2281, 1e-4);
  EXPECT_NEAR(student_quantile(4, 0.001), 8.6103, 1e-3);
  EXPECT_NEAR(student_quantile(1000, 0.0455), 2.002, 1e-2);
}

}  // namespace
}  // namespace isoshard
