// SPDX-License-Identifier: Apache-2.0
/// Every fault of the catalogue raises an alarm that names the first wrong tensor, the rank and the
/// cause; the same run without the fault is silent, and so is every benign variation.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "harness/judge/judge.h"
#include "harness/verdict/equal_runs.h"
#include "suite/faults/fault.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

Verdict verdict_of(const Case& item, const RunOptions& options) {
  const Reference& reference = reference_of(item);
  return judge(reference, run_case(item, reference, options), policy_of(item));
}

std::string first_of(const Verdict& verdict) {
  if (verdict.findings.empty()) return verdict.reason;
  const Finding& first = verdict.findings.front();
  return fmt::format("{}\n{}\n{}", first.what, first.evidence, first.diagnosis);
}

/// What was seen of the faults of one class.
struct ClassScore {
  int faults = 0, alarms = 0, first_right = 0, diagnosis_right = 0;
};

class FaultDetection : public ::testing::TestWithParam<std::string> {
 protected:
  const Fault& fault() const { return find_fault(GetParam()); }

  static void TearDownTestSuite() {
    fmt::print("class  faults  alarm  first tensor  diagnosis\n");
    ClassScore all;
    const auto line = [](const std::string& name, const ClassScore& s) {
      fmt::print("{:<5}  {:>6}  {:>5}  {:>12}  {:>9}\n", name, s.faults, s.alarms, s.first_right,
                 s.diagnosis_right);
    };
    for (const auto& [name, score] : scores()) {
      line(std::string(1, name), score);
      all.faults += score.faults;
      all.alarms += score.alarms;
      all.first_right += score.first_right;
      all.diagnosis_right += score.diagnosis_right;
    }
    line("all", all);
  }

  static std::map<char, ClassScore>& scores() {
    static std::map<char, ClassScore> by_class;
    return by_class;
  }
};

TEST_P(FaultDetection, AlarmsAndNamesTheFirstTensorRankAndCause) {
  ASSERT_TRUE(fault().expected.has_value());
  const ExpectedDetection& expected = *fault().expected;
  const Case item = fault().smallest_case();
  const FaultProbe probe;
  ClassScore& score = scores()[fault().fault_class];
  ++score.faults;

  const Verdict verdict = verdict_of(item, with_fault({}, fault(), item, probe));

  ASSERT_GT(probe.count(), 0) << "the fault never fired: this test would prove nothing";
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  ASSERT_FALSE(verdict.findings.empty());
  ++score.alarms;
  const Finding& first = verdict.findings.front();
  ASSERT_FALSE(first.ranks.empty());
  const bool first_right = first.stage == expected.stage &&
                           (expected.name.empty() || first.key.name == expected.name) &&
                           first.key.step == expected.step;
  EXPECT_TRUE(first_right) << "expected " << name_of(expected.stage) << " of " << expected.name
                           << " in step " << expected.step << "\n"
                           << first_of(verdict);
  EXPECT_THAT(expected.ranks, Contains(first.ranks.front())) << first_of(verdict);
  score.first_right += static_cast<int>(first_right);
  EXPECT_THAT(first.diagnosis, HasSubstr(expected.diagnosis)) << first_of(verdict);
  score.diagnosis_right +=
      static_cast<int>(first.diagnosis.find(expected.diagnosis) != std::string::npos);
  EXPECT_TRUE(first.confirmed || first.stage == Stage::kReplicaDrift)
      << "the controller must have repeated the finding on the kept bytes";
}

TEST_P(FaultDetection, TheSameRunWithoutTheFaultConforms) {
  const Case item = fault().smallest_case();
  ASSERT_GT(item.world_size(), 1);

  const Verdict verdict = verdict_of(item, {});

  EXPECT_EQ(verdict.mesh.world_size(), item.world_size());
  EXPECT_EQ(verdict.status, Status::kConforms) << first_of(verdict);
  EXPECT_GT(verdict.compared, 100);
}

class BenignVariation : public ::testing::TestWithParam<std::string> {
 protected:
  const Fault& miss() const { return find_fault(GetParam()); }
};

TEST_P(BenignVariation, DoesNotAlarm) {
  const Case item = miss().smallest_case();
  ASSERT_GT(item.world_size(), 1);
  const FaultProbe probe;

  const Verdict verdict = verdict_of(item, with_fault({}, miss(), item, probe));

  EXPECT_GT(probe.count(), 0) << "nothing was changed: this test would prove nothing";
  EXPECT_EQ(verdict.status, Status::kConforms) << "a false alarm: " << first_of(verdict);
  EXPECT_GT(verdict.compared, 100);
}

// The same kind of difference, but larger than legal, is alarmed where it is made.
class BenignVariationControl : public ::testing::TestWithParam<std::string> {};

TEST_P(BenignVariationControl, IsAlarmed) {
  const auto controls = benign_variation_controls();
  const Fault& control = *std::find_if(controls.begin(), controls.end(),
                                       [](const Fault& f) { return f.id == GetParam(); });
  const Case item = control.smallest_case();
  const FaultProbe probe;

  const Verdict verdict = verdict_of(item, with_fault({}, control, item, probe));

  EXPECT_GT(probe.count(), 0);
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.front().stage, control.expected->stage) << first_of(verdict);
}

// In bf16 a fused kernel is within what is allowed, but it is not equal: where equality is
// declared, it alarms.
TEST(BenignVariationControl, FusedRoundingIsAlarmedWhereEqualityIsDeclared) {
  const Fault& miss = find_fault("fused_rounding");
  const Case item = miss.smallest_case();
  const Reference& reference = reference_of(item);
  const FaultProbe probe;
  JudgePolicy options = policy_of(item);
  options.level = Level::kExact;

  const Verdict verdict =
      judge(reference, run_case(item, reference, with_fault({}, miss, item, probe)), options);

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.front().stage, Stage::kForward) << first_of(verdict);
}

// A race is lost in some runs only: each of those is alarmed, the others are clean, and no two
// kinds of runs are equal.
TEST(RaceDetection, TwentyRunsOfARaceAreNotRepeatable) {
  const Fault& fault = find_fault("bucket_refilled_before_reduce_ends");
  const Case item = fault.smallest_case();
  const Reference& reference = reference_of(item);
  const Trace first = run_case(item, reference);
  int alarms = 0, unequal = 0;

  for (std::uint32_t run = 0; run < 20; ++run) {
    const FaultProbe probe;
    const bool is_lost = (philox4x32({run, 0, 0, 0}, {0, 0})[0] & 1) != 0;
    const Trace trace =
        run_case(item, reference, is_lost ? with_fault({}, fault, item, probe) : RunOptions{});
    const bool alarm = judge(reference, trace, policy_of(item)).status == Status::kDiverges;
    EXPECT_EQ(alarm, is_lost) << "run " << run;
    alarms += static_cast<int>(alarm);
    const RunEquality equality = equality_of(first, trace);
    unequal += static_cast<int>(!equality.holds());
    EXPECT_EQ(equality.holds(), !is_lost) << "run " << run << ": " << equality.difference;
  }

  EXPECT_GT(alarms, 2);
  EXPECT_LT(alarms, 18) << "the coin decides nothing";
  EXPECT_EQ(unequal, alarms);
}

std::vector<std::string> ids_of(std::span<const Fault> faults) {
  std::vector<std::string> ids;
  for (const Fault& fault : faults) ids.push_back(fault.id);
  return ids;
}

INSTANTIATE_TEST_SUITE_P(Catalogue, FaultDetection, ::testing::ValuesIn(ids_of(fault_catalogue())),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Catalogue, BenignVariation,
                         ::testing::ValuesIn(ids_of(benign_variations())),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Catalogue, BenignVariationControl,
                         ::testing::ValuesIn(ids_of(benign_variation_controls())),
                         [](const auto& test) { return test.param; });

TEST(FaultCatalogue, UnknownNamesAreRefusedWithASuggestion) {
  try {
    (void)find_fault("dp_sum_mising");
    FAIL() << "an unknown fault was accepted";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean 'dp_sum_missing'"));
  }
}

TEST(FaultCatalogue, EveryFaultHasAHookACaseAndAnExpectation) {
  ASSERT_GE(fault_catalogue().size(), 49U);
  for (const Fault& fault : fault_catalogue()) {
    EXPECT_GE(fault.hooks.count(), 1) << fault.id;
    EXPECT_FALSE(fault.subjects.empty()) << fault.id;
    EXPECT_FALSE(fault.source.empty()) << fault.id;
    ASSERT_TRUE(fault.expected.has_value()) << fault.id;
    EXPECT_FALSE(fault.expected->diagnosis.empty()) << fault.id;
    EXPECT_NO_THROW(fault.smallest_case().validate()) << fault.id;
  }
}

TEST(FaultCatalogue, EveryBenignVariationHasAHookAndExpectsNothing) {
  ASSERT_GE(benign_variations().size(), 25U);
  for (const Fault& miss : benign_variations()) {
    EXPECT_GE(miss.hooks.count(), 1) << miss.id;
    EXPECT_FALSE(miss.expected.has_value()) << miss.id;
    EXPECT_NO_THROW(miss.smallest_case().validate()) << miss.id;
    const auto controls = benign_variation_controls();
    EXPECT_TRUE(std::any_of(controls.begin(), controls.end(),
                            [&](const Fault& control) { return miss.id.starts_with(control.id); }))
        << miss.id << " has no control: nothing shows how much too much is";
  }
}

}  // namespace
}  // namespace isoshard
