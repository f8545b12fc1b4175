// SPDX-License-Identifier: Apache-2.0
/// Each matcher in both directions: it matches what it should, and fails, with words that help,
/// where it must.
#include "harness/testing/matchers.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "harness/testing/run_world.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::Not;

Body gradient(double factor) {
  return [=](Sink& sink, int) {
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({4, 6})), values({4, 6}, 1) * factor);
  };
}

JudgePolicy exact() {
  JudgePolicy options;
  options.level = Level::kExact;
  return options;
}

// gtest-spi's statements may not refer to local variables.
const Reference& shared_reference() {
  static const Reference r = reference(gradient(1));
  return r;
}
Trace two_ranks(double factor) {
  return run(MeshShape({{Axis::kDp, 2}}), &shared_reference(), gradient(factor));
}

TEST(ConformsTo, MatchesARunThatConforms) {
  EXPECT_THAT(two_ranks(1), conforms_to(shared_reference(), exact()));
  EXPECT_THAT(two_ranks(2), Not(conforms_to(shared_reference(), exact())));
}

TEST(ConformsTo, FailsWithTheReportWhenTheRunDiverges) {
  EXPECT_NONFATAL_FAILURE(EXPECT_THAT(two_ranks(2), conforms_to(shared_reference(), exact())),
                          "likely cause: gradient of w: scale 2 = dp");
}

TEST(ConformsTo, FailsWhenTheRunIsIncompleteOrVacuous) {
  EXPECT_NONFATAL_FAILURE(
      {
        Trace trace = two_ranks(1);
        trace.ranks.pop_back();
        EXPECT_THAT(trace, conforms_to(shared_reference(), exact()));
      },
      "INCOMPLETE");
  EXPECT_NONFATAL_FAILURE(EXPECT_THAT(two_ranks(1), conforms_to(shared_reference())), "VACUOUS");
}

TEST(BitEqualTo, MatchesEqualBytesWhateverTheStrides) {
  const at::Tensor x = values({4, 6}, 1);
  EXPECT_THAT(x.t(), bit_equal_to(x.t().contiguous()));
  EXPECT_THAT(at::full({2}, NAN), bit_equal_to(at::full({2}, NAN)));
  EXPECT_THAT(x.to(at::kBFloat16), bit_equal_to(x.to(at::kBFloat16)));
}

TEST(BitEqualTo, FailsAtOneUlpASignedZeroAShapeOrADtype) {
  EXPECT_NONFATAL_FAILURE(
      EXPECT_THAT(at::full({2, 2}, 1.0F + 0x1p-23F), bit_equal_to(at::ones({2, 2}))),
      "differs in 4 of 4 elements, first at [0, 0]");
  EXPECT_NONFATAL_FAILURE(
      EXPECT_THAT(at::tensor({1.0F, -0.0F}), bit_equal_to(at::tensor({1.0F, 0.0F}))),
      "first at [1]: -0 instead of 0");
  EXPECT_NONFATAL_FAILURE(EXPECT_THAT(at::ones({4}), bit_equal_to(at::ones({2, 2}))),
                          "has shape [4]");
  EXPECT_NONFATAL_FAILURE(EXPECT_THAT(at::ones({2}), bit_equal_to(at::ones({2}, at::kDouble))),
                          "dtype Float instead of");
  EXPECT_NONFATAL_FAILURE(EXPECT_THAT(at::Tensor(), bit_equal_to(at::ones({2}))), "is undefined");
}

// Of this process, whatever its tests: ctest compares them with the labels of a suite.
TEST(WorldSizes, AreThoseOfTheWorldsThatWereStarted) {
  for (const int size : {3, 1, 2})
    run_world(size, [size](Rank& rank) { EXPECT_EQ(rank.size(), size); });

  EXPECT_EQ(world_sizes_problem("2,3"), "");
  for (const char* const wrong : {"", "2", "2,3,6", "1,2,3"}) {
    EXPECT_THAT(world_sizes_problem(wrong),
                testing::HasSubstr("'2,3', and its labels say '" + std::string(wrong) + "'"));
  }
  // A share of a suite needs not start all sizes, but none that is not declared.
  EXPECT_EQ(world_sizes_problem("2,3,6", /*is_share=*/true), "");
  for (const char* const wrong : {"", "2", "2,13", "1,3"})
    EXPECT_NE(world_sizes_problem(wrong, /*is_share=*/true), "") << wrong;
}

}  // namespace
}  // namespace isoshard
