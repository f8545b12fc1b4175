// SPDX-License-Identifier: Apache-2.0
// Without a tolerance every fault of the catalogue shows, and
// no later than against the plain reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/judge/judge.h"
#include "suite/faults/fault.h"
#include "suite/record/expected_calls.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

// A fault that a tolerance hides for a while is seen no later than where the plain reference sees
// it.
void expect_seen_no_later(const std::string& id) {
  const Fault& fault = find_fault(id);
  const Case item = fault.smallest_case();
  const FaultProbe probe;
  const Reference reference = make_emulated_reference(item, numerics_of(item));

  const Trace actual = run_case(item, reference, with_fault({}, fault, item, probe));
  const Verdict verdict = judge(reference, actual, with_collectives(exact_policy_of(item), item));

  ASSERT_GT(probe.count(), 0) << "the fault never fired: this test would prove nothing";
  ASSERT_EQ(verdict.status, Status::kDiverges);
  const Finding& first = verdict.findings.front();
  EXPECT_LE(first.stage, fault.expected->stage) << first.what;
}

// The first of each class, or all others.
std::vector<std::string> fault_ids(bool firsts) {
  std::set<char> seen;
  std::vector<std::string> ids;
  for (const Fault& fault : fault_catalogue()) {
    const bool is_first = seen.insert(fault.fault_class).second;
    if (is_first == firsts) ids.push_back(fault.id);
  }
  return ids;
}

class EmulatedFaults : public ::testing::TestWithParam<std::string> {};
class EmulatedFaultsWide : public ::testing::TestWithParam<std::string> {};

TEST_P(EmulatedFaults, DivergeNoLaterThanAgainstThePlainReference) {
  expect_seen_no_later(GetParam());
}
TEST_P(EmulatedFaultsWide, DivergeNoLaterThanAgainstThePlainReference) {
  expect_seen_no_later(GetParam());
}

const auto id_of = [](const auto& test) { return test.param; };
INSTANTIATE_TEST_SUITE_P(Catalogue, EmulatedFaults, ::testing::ValuesIn(fault_ids(true)), id_of);
INSTANTIATE_TEST_SUITE_P(Catalogue, EmulatedFaultsWide, ::testing::ValuesIn(fault_ids(false)),
                         id_of);

}  // namespace
}  // namespace isoshard
