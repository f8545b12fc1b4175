// SPDX-License-Identifier: Apache-2.0
// Every accepted golden against this build: equal in every bit
// where the machine rounds as the golden's, else within its drift.
#include <gtest/gtest.h>

#include <ostream>
#include <set>

#include "suite/goldens/golden_run.h"
#include "suite/testing/every_nth.h"

namespace isoshard {

void PrintTo(const GoldenSpec& spec, std::ostream* out) {
  *out << spec.name;
}

namespace {

std::vector<GoldenSpec> specs_of(GoldenKind kind) {
  std::vector<GoldenSpec> specs;
  for (const GoldenSpec& spec : golden_specs()) {
    if (spec.kind == kind) specs.push_back(spec);
  }
  return specs;
}

std::string golden_name(const ::testing::TestParamInfo<GoldenSpec>& info) {
  return info.param.name;
}

class GoldenSuite : public ::testing::TestWithParam<GoldenSpec> {
 protected:
  static void expect_no_regression(int steps = kAllSteps) {
    const std::string failure = golden_failure(GetParam().name, steps);

    if (is_recording_goldens())
      GTEST_SKIP() << "recorded, not checked: isoshard golden review " << GetParam().name;
    EXPECT_EQ(failure, "");
  }
};
class GoldenCurves : public GoldenSuite {};
class WholeGoldenCurves : public GoldenSuite {};
class GoldenSteps : public GoldenSuite {};
class GoldenLattices : public GoldenSuite {};

// What differs does so from the first steps on. All steps take minutes.
TEST_P(GoldenCurves, BeginAsThoseOfThisBuild) {
  expect_no_regression(25);
}
TEST_P(WholeGoldenCurves, AreThoseOfThisBuild) {
  expect_no_regression();
}
TEST_P(GoldenSteps, AreThoseOfThisBuild) {
  expect_no_regression();
}
TEST_P(GoldenLattices, AreThoseOfThisBuildOnEveryMachine) {
  expect_no_regression();
}
INSTANTIATE_TEST_SUITE_P(Accepted, GoldenCurves,
                         ::testing::ValuesIn(every_nth(2, specs_of(GoldenKind::kCurve))),
                         golden_name);
INSTANTIATE_TEST_SUITE_P(Accepted, WholeGoldenCurves,
                         ::testing::ValuesIn(specs_of(GoldenKind::kCurve)), golden_name);
INSTANTIATE_TEST_SUITE_P(Accepted, GoldenSteps, ::testing::ValuesIn(specs_of(GoldenKind::kStep)),
                         golden_name);
INSTANTIATE_TEST_SUITE_P(Accepted, GoldenLattices,
                         ::testing::ValuesIn(specs_of(GoldenKind::kLattice)), golden_name);

TEST(GoldenList, IsWhatTheManifestLists) {
  const GoldenStore store(default_golden_folder());
  std::set<std::string> listed, known;
  for (const auto& [name, entry] : store.entries()) listed.insert(name);
  for (const GoldenSpec& spec : golden_specs()) known.insert(spec.name);

  EXPECT_EQ(listed, known);
  EXPECT_EQ(store.unlisted_files(), std::vector<std::string>());
}

TEST(GoldenList, NamesAreUniqueAndFit) {
  std::set<std::string> names;
  for (const GoldenSpec& spec : golden_specs()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_EQ(spec.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_"),
              std::string::npos)
        << spec.name;
  }
  EXPECT_GE(names.size(), 20U);
}

}  // namespace
}  // namespace isoshard
