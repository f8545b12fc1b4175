// SPDX-License-Identifier: Apache-2.0
// From runs that differ to findings.
#include "harness/verify/subject_runs.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "harness/trace/stage.h"

namespace isoshard {
namespace {

/// `finding` comes first, and `reason` is what the verdict line says.
void diverge(Verdict& verdict, Finding finding, std::string reason) {
  set_diverges(verdict);
  verdict.equal_to_emulation.reset();
  verdict.findings.insert(verdict.findings.begin(), std::move(finding));
  verdict.reason = std::move(reason);
}

Finding finding_at(const RunDifference& where, FindingId id, NamedValues values,
                   NamedValues measured) {
  const RecordKey key = where.key.value_or(RecordKey());
  Finding finding = make_finding(key, where.key.has_value() ? describe(key) : "", id,
                                 std::move(values), std::move(measured));
  if (where.rank >= 0) finding.ranks = {where.rank};
  return finding;
}

}  // namespace

Trace without_bytes(const Trace& run) {
  Trace bare = run;
  for (RankTrace& rank : bare.ranks) rank.arena = nullptr;
  return bare;
}

void SubjectRuns::add(const Trace& run) {
  if (++num_runs_ == 1) {
    first_ = without_bytes(run);
    return;
  }
  if (difference_.has_value()) return;
  const RunEquality equality = equality_of(first_, run);
  if (equality.holds()) return;
  difference_ = Difference{
      num_runs_, equality.first.value_or(RunDifference{.what = "neither run recorded a tensor"})};
}

void SubjectRuns::settle(Verdict& verdict) const {
  verdict.runs = num_runs_;
  if (!difference_.has_value()) return;
  const auto& [run, where] = *difference_;
  NamedValues measured = {{"runs", num_runs_}, {"run", run}, {"difference", where.describe()}};
  if (not_emulated_.has_value())
    measured.push_back(NamedValue::words(
        "not_emulated",
        phrase(FindingPhraseId::kNotEmulated, {{"difference", not_emulated_->describe()}})));
  Finding finding = finding_at(where, FindingId::kRunsDiffer, {{"run", run}}, std::move(measured));
  finding.cause = make_cause(
      CauseId::kNotRepeatable,
      {{"run", run}, {"subject", verdict.subject.empty() ? "the subject" : verdict.subject}});
  finding.diagnosis = finding.cause.text;
  std::string reason =
      fmt::format("not repeatable: run {} differs from run 1, first {}", run, where.describe());
  diverge(verdict, std::move(finding), std::move(reason));
}

void diverge_in_bits(Verdict& verdict, const RunDifference& where) {
  Finding finding =
      where.key.has_value()
          ? finding_at(where, FindingId::kOtherBits, {}, {{"difference", where.describe()}})
          : finding_at(where, FindingId::kOtherRanks, {{"difference", where.what}},
                       {{"difference", where.describe()}});
  std::string reason = words_of_first(finding, verdict.mesh);
  diverge(verdict, std::move(finding), std::move(reason));
}

bool name_same_tensor(const Verdict& a, const Verdict& b) {
  return !a.findings.empty() && !b.findings.empty() &&
         a.findings.front().key == b.findings.front().key;
}

Verdict with_cause_of(Verdict exact, const Verdict& within) {
  if (exact.findings.empty() || within.findings.empty()) return exact;
  Finding& first = exact.findings.front();
  if (!first.diagnosis.empty()) return exact;
  const Finding& other = within.findings.front();
  first.cause = other.cause;
  first.diagnosis = other.diagnosis;
  // what is said of the forward pass holds within tolerances only
  first.diagnosis.resize(other.diagnosis.size() - other.forward_words.size());
  exact.reason = words_of_first(first, exact.mesh);
  return exact;
}

}  // namespace isoshard
