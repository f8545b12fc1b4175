// SPDX-License-Identifier: Apache-2.0
// Without a tolerance every fault of the catalogue shows, and no later than against the plain reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/detection/fault.h"
#include "conformance/emulated/emulated_cases.h"

namespace isoshard {
namespace {

class EmulatedFaults : public ::testing::TestWithParam<std::string> {};

// A fault that a tolerance hides for a while is seen no later than where the plain reference sees it.
TEST_P(EmulatedFaults, DivergeNoLaterThanAgainstThePlainReference) {
  const Fault& fault = find_fault(GetParam());
  const Case item = fault.smallest_case();
  const FaultProbe probe;
  const Reference reference = make_emulated_reference(item, arithmetic_of(item));

  const Trace actual = run_case(item, reference, with_fault({}, fault, item, probe));
  const Verdict verdict = judge(reference, actual, exact_options(item));

  ASSERT_GT(probe.count(), 0) << "the fault never fired: this test would prove nothing";
  ASSERT_EQ(verdict.status, Status::kDiverges);
  const Finding& first = verdict.findings.front();
  EXPECT_LE(first.stage, fault.expected->stage) << first.what;
}

std::vector<std::string> fault_ids() {
  std::vector<std::string> ids;
  for (const Fault& fault : fault_catalogue()) ids.push_back(fault.id);
  return ids;
}

INSTANTIATE_TEST_SUITE_P(Catalogue, EmulatedFaults, ::testing::ValuesIn(fault_ids()), [](const auto& test) { return test.param; });

}  // namespace
}  // namespace isoshard
