// SPDX-License-Identifier: Apache-2.0
// The contiguous split of samples over dp.
#include "data/sampler.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace isoshard {
namespace {

TEST(Sampler, CoversEachStepOnceInOrder) {
  std::int64_t next = 0;
  for (int step = 0; step < 3; ++step) {
    for (int coordinate = 0; coordinate < 3; ++coordinate) {
      const SampleRange range = samples_of(step, 3, coordinate, 2);

      EXPECT_EQ(range.first, next);
      EXPECT_EQ(range.count, 2);
      next += range.count;
    }
  }
}

TEST(Sampler, RefusesWhatNoRankCanHave) {
  EXPECT_THROW((void)samples_of(0, 2, 2, 1), UsageError);
  EXPECT_THROW((void)samples_of(0, 2, 0, 0), UsageError);
  EXPECT_THROW((void)samples_of(0, 0, 0, 1), UsageError);
}

}  // namespace
}  // namespace isoshard
