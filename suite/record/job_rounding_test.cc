// SPDX-License-Identifier: Apache-2.0
/// What is said of processes that round otherwise.
#include "suite/record/job_rounding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fixtures/oracle/arithmetic_digest.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(JobRounding, OfEqualDigestsIsThatDigest) {
  const JobRounding rounding = job_rounding({{7, "a", "x"}, {7, "b", "y"}});

  EXPECT_EQ(rounding.digest, 7U);
  EXPECT_EQ(rounding.difference, "");
}

TEST(JobRounding, NamesEveryHostThatRoundsOtherwise) {
  const JobRounding rounding =
      job_rounding({{7, "a", "x"}, {8, "b", "y"}, {7, "a", "x"}, {8, "b", "y"}, {9, "c", "z"}});

  EXPECT_EQ(rounding.digest, 0U);
  EXPECT_THAT(rounding.difference,
              AllOf(HasSubstr("ranks 1, 3 on b (y, arithmetic digest 0000000000000008)"),
                    HasSubstr("rank 4 on c (z,"), HasSubstr("rank 0 on a (x, 0000000000000007)"),
                    Not(HasSubstr("rank 2 "))));
}

TEST(JobRounding, OfOneProcessIsItsOwn) {
  EXPECT_EQ(rounding_of_job(forked_launcher()).digest, arithmetic_digest());
}

}  // namespace
}  // namespace isoshard
