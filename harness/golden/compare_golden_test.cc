// SPDX-License-Identifier: Apache-2.0
// The three answers, and their text.
#include "harness/golden/compare_golden.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/golden/test_golden_rows.h"

namespace isoshard {
namespace {

using namespace golden_rows;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(GoldenAnswers, AreRightForEveryRow) {
  for (const Row& r : rows()) {
    const GoldenComparison said = compare_golden(r.golden, r.actual);

    EXPECT_EQ(name_of(said.answer), name_of(r.answer)) << r.name;
    EXPECT_EQ(said.first.has_value() ? said.first->line : "", r.line) << r.name;
    EXPECT_TRUE(answers<GoldenRules>(r)) << r.name;
  }
}

TEST(GoldenAnswers, ARegressionShowsStepBothHexValuesAndTheCommand) {
  const Golden golden = curve();
  Golden actual = golden;
  actual.lines[2].numbers[0].value = up(3.0);
  actual.lines[4].numbers[0].value = 7;

  const std::string text =
      render(golden, actual, compare_golden(golden, actual), "isoshard verify --steps 3");

  EXPECT_THAT(
      text, AllOf(HasSubstr("REGRESSION  curve_x"),
                  HasSubstr("first step 2: loss: golden 0x1.8000000000000p+1, here "
                            "0x1.8000000000001p+1"),
                  HasSubstr("1 ulp"), HasSubstr("every bit must be equal"),
                  HasSubstr("look further: isoshard verify --steps 3"), Not(HasSubstr("step 4"))));
}

TEST(GoldenAnswers, ADriftShowsWhatDiffersBetweenTheMachines) {
  const Golden golden = curve();
  Golden actual = elsewhere(golden);
  actual.fingerprint["cpu"] = "B";
  actual.lines[2].numbers[0].value += kDrift / 2;

  const GoldenComparison comparison = compare_golden(golden, actual);
  const std::string text = render(golden, actual, comparison, "");

  EXPECT_DOUBLE_EQ(comparison.largest_share, 0.5);
  EXPECT_THAT(text,
              AllOf(HasSubstr("DRIFT"), HasSubstr("1 of 6 lines differ"),
                    HasSubstr("cpu: golden A, here B"),
                    HasSubstr("arithmetic digest: golden 00000000000000aa, here 00000000000000ee"),
                    HasSubstr("first step 2")));
}

TEST(GoldenAnswers, ADriftOfAGoldenWithoutProjectionsIsSaidToBeWeak) {
  const Golden old = digests();
  Golden actual = elsewhere(old);
  actual.lines[1].digest = "0000000000000009";

  const GoldenComparison comparison = compare_golden(old, actual);

  EXPECT_EQ(comparison.answer, GoldenAnswer::kDrift);
  EXPECT_THAT(render(old, actual, comparison, ""),
              AllOf(HasSubstr("1 lines have a norm and no projections"),
                    HasSubstr("isoshard golden record curve_x")));
  EXPECT_THAT(render(projected(), elsewhere(projected()),
                     compare_golden(projected(), elsewhere(projected())), ""),
              Not(HasSubstr("no projections")));
}

TEST(GoldenAnswers, AnotherConfigWeightsOrInputsAreStaleNotWrong) {
  Golden golden = curve();
  golden.config = {{"dtype", "\"fp32\""}, {"seed", "1"}};
  golden.weights_sha256 = "a";
  Golden actual = golden;
  EXPECT_EQ(staleness(golden, actual), "");
  actual.config = {{"dtype", "\"bf16\""}, {"steps", "3"}};
  actual.weights_sha256 = "b";
  actual.inputs_sha256 = "c";

  EXPECT_THAT(
      staleness(golden, actual),
      AllOf(HasSubstr("dtype: golden \"fp32\", here \"bf16\""),
            HasSubstr("seed: golden 1, here not set"), HasSubstr("steps: golden not set, here 3"),
            HasSubstr("weights: golden a, here b"), HasSubstr("inputs")));
}

TEST(GoldenAnswers, UlpsAreStepsOfADouble) {
  EXPECT_EQ(ulps_between(1.0, 1.0), 0);
  EXPECT_EQ(ulps_between(1.0, up(up(1.0))), 2);
  EXPECT_EQ(ulps_between(-1.0, -up(1.0)), 1);
  EXPECT_EQ(ulps_between(0.0, -0.0), kInf);
  EXPECT_EQ(ulps_between(1.0, kNan), kInf);
}

}  // namespace
}  // namespace isoshard
