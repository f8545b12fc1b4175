// SPDX-License-Identifier: Apache-2.0
/// Faults that concern fsdp_tp or megatron are alarmed on them, where the catalogue says that they
/// show first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "harness/judge/judge.h"
#include "suite/faults/fault.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

std::vector<std::string> faults_of(std::string_view subject) {
  std::vector<std::string> ids;
  for (const Fault& fault : fault_catalogue()) {
    if (std::find(fault.subjects.begin(), fault.subjects.end(), subject) != fault.subjects.end())
      ids.push_back(fault.id);
  }
  return ids;
}

Verdict verdict_of(const Case& item, const RunOptions& options) {
  const Reference& reference = reference_of(item);
  return judge(reference, run_case(item, reference, options), policy_of(item));
}

/// The catalog's cause. Ranks of fsdp_tp have pieces of gradients, where others have copies.
ExpectedCause cause_on(std::string_view subject, const Fault& fault) {
  ExpectedCause cause = fault.expected->cause;
  const bool is_in_pieces = subject == "fsdp_tp" && fault.expected->stage == Stage::kParameterGrad;
  if (is_in_pieces && cause.id == CauseId::kRankLocal) cause.id = CauseId::kPiecesRankLocal;
  return cause;
}

/// The fault's smallest case with another subject.
void expect_alarm(const Fault& fault, std::string_view subject) {
  Case item = fault.smallest_case();
  item.subject = subject;
  const FaultProbe probe;

  const Verdict clean = verdict_of(item, {}),
                verdict = verdict_of(item, with_fault({}, fault, item, probe));

  ASSERT_EQ(clean.status, Status::kConforms) << clean.reason;
  ASSERT_EQ(clean.mesh.world_size(), item.degrees.dp * item.degrees.tp);
  ASSERT_GT(probe.count(), 0) << "the fault never fired: this test would prove nothing";
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  const Finding& first = verdict.findings.front();
  EXPECT_EQ(first.stage, fault.expected->stage) << first.what;
  EXPECT_EQ(first.key.step, fault.expected->step) << first.what;
  if (!fault.expected->name.empty()) {
    EXPECT_EQ(final_of(first.key).name, fault.expected->name) << first.what;
  }
  EXPECT_THAT(fault.expected->ranks, ::testing::Contains(first.ranks.front())) << first.what;
  EXPECT_EQ(mismatch(cause_on(subject, fault), first.cause), "") << first.what;
}

class FsdpFaults : public ::testing::TestWithParam<std::string> {};
TEST_P(FsdpFaults, AlarmAtTheFirstTensor) {
  expect_alarm(find_fault(GetParam()), "fsdp_tp");
}
INSTANTIATE_TEST_SUITE_P(Catalogue, FsdpFaults, ::testing::ValuesIn(faults_of("fsdp_tp")),
                         [](const auto& test) { return test.param; });

class MegatronFaults : public ::testing::TestWithParam<std::string> {};
TEST_P(MegatronFaults, AlarmAtTheFirstTensor) {
  expect_alarm(find_fault(GetParam()), "megatron");
}
INSTANTIATE_TEST_SUITE_P(Catalogue, MegatronFaults, ::testing::ValuesIn(faults_of("megatron")),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace isoshard
