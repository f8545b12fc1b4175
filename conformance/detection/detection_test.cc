// SPDX-License-Identifier: Apache-2.0
/// Every fault of the catalogue raises an alarm that names the first wrong tensor, the rank and the cause - and the same run
/// without the fault is silent.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "conformance/detection/fault.h"
#include "fixtures/reference/reference.h"

namespace isoshard {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

class FaultDetection : public ::testing::TestWithParam<std::string> {
 protected:
  const Fault& fault() const { return find_fault(GetParam()); }
};

TEST_P(FaultDetection, AlarmsAndNamesTheFirstTensorRankAndCause) {
  const Case item = fault().smallest_case();
  const FaultProbe probe;

  const Reference reference = reference_of(item);
  const Trace trace = run_case(item, reference, with_fault({}, fault(), item, probe));
  const Verdict verdict = judge(reference, trace, judge_options(item));

  ASSERT_GT(probe.count(), 0) << "the fault never fired: this test would prove nothing";
  ASSERT_EQ(verdict.status, Status::kDiverges);
  ASSERT_FALSE(verdict.findings.empty());
  const Finding& first = verdict.findings.front();
  const ExpectedDetection& expected = fault().expected;
  EXPECT_EQ(name_of(first.stage), name_of(expected.stage)) << first.what;
  if (!expected.name.empty()) EXPECT_EQ(first.key.name, expected.name);
  EXPECT_THAT(first.diagnosis, HasSubstr(expected.diagnosis)) << first.what << "\n" << first.evidence;
  ASSERT_FALSE(first.ranks.empty());
  EXPECT_THAT(expected.ranks, Contains(first.ranks.front()));
  EXPECT_TRUE(first.confirmed) << "the controller must have repeated the finding on the kept bytes";
}

TEST_P(FaultDetection, TheSameRunWithoutTheFaultConforms) {
  const Case item = fault().smallest_case();

  const Reference reference = reference_of(item);
  const Trace trace = run_case(item, reference);
  const Verdict verdict = judge(reference, trace, judge_options(item));

  EXPECT_EQ(static_cast<int>(trace.ranks.size()), item.world_size());
  EXPECT_GT(item.world_size(), 1);
  EXPECT_EQ(verdict.status, Status::kConforms) << (verdict.findings.empty() ? verdict.reason : verdict.findings.front().what);
  EXPECT_GT(verdict.compared, 100);
}

std::vector<std::string> fault_ids() {
  std::vector<std::string> ids;
  for (const Fault& fault : fault_catalogue()) ids.push_back(fault.id);
  return ids;
}

INSTANTIATE_TEST_SUITE_P(Catalogue, FaultDetection, ::testing::ValuesIn(fault_ids()), [](const auto& info) { return info.param; });

TEST(FaultCatalogue, UnknownNamesAreRefusedWithASuggestion) {
  try {
    (void)find_fault("dp_sum_mising");
    FAIL() << "an unknown fault was accepted";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean 'dp_sum_missing'"));
  }
}

TEST(FaultCatalogue, EveryFaultHasAHookACaseAndAnExpectation) {
  ASSERT_GE(fault_catalogue().size(), 3U);
  for (const Fault& fault : fault_catalogue()) {
    EXPECT_TRUE(static_cast<bool>(fault.collective) != static_cast<bool>(fault.mutation)) << fault.id;
    EXPECT_FALSE(fault.expected.diagnosis.empty()) << fault.id;
    EXPECT_NO_THROW(fault.smallest_case().validate()) << fault.id;
  }
}

}  // namespace
}  // namespace isoshard
