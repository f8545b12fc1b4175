// SPDX-License-Identifier: Apache-2.0
// Verdicts on runs with a fault, against the catalog.
#include "suite/verify/detect_faults.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "harness/trace/clipped.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "suite/reference/warm_up_training.h"
#include "suite/verify/verify_case.h"

namespace isoshard {
namespace {

std::string place_of(Stage stage, const std::string& name, int step) {
  return fmt::format("{} of {} in step {}", name_of(stage), name.empty() ? "any tensor" : name,
                     step);
}

ReportCase judged(const Fault& fault, VerifyObserver& observer) {
  const Case item = fault.smallest_case();
  observer.on_case(item);
  ReportCase result{.name = item.slug(), .fault = fault.id};
  try {
    // As verify --fault: a benign variation is legal, but not what its subject declares.
    const ReferenceKind reference =
        fault.expected.has_value() ? ReferenceKind::kAuto : ReferenceKind::kPlain;
    CaseJudge judge({.reference = reference, .fault = fault.id});
    CaseJudgement judgement = judge.judge_case(item);
    const std::string problem = missed(fault, judgement.verdict);
    result.detection = ReportDetection{problem.empty(), problem};
    result.verdict = std::move(judgement.verdict);
    result.against = name_of(judgement.against);
  } catch (const std::exception& error) {
    set_failure(result, error);
  }
  return result;
}

}  // namespace

std::string missed(const Fault& fault, const Verdict& verdict) {
  if (!fault.expected.has_value()) {
    return verdict.status == Status::kConforms
               ? ""
               : "a legal difference must not alarm, got: " + verdict.reason;
  }
  const ExpectedDetection& expected = *fault.expected;
  if (verdict.status != Status::kDiverges || verdict.findings.empty())
    return fmt::format("it must be alarmed, got: {}", verdict.reason);
  const Finding& first = verdict.findings.front();
  // of several micro-batches the sum after one of them is named, where that is wrong already
  const std::string name = final_gradient_of(first.key).value_or(first.key).name;
  const bool is_place = first.stage == expected.stage && first.key.step == expected.step &&
                        (expected.name.empty() || name == expected.name);
  if (!is_place) {
    return fmt::format("the first finding must be {}, got {}",
                       place_of(expected.stage, expected.name, expected.step),
                       place_of(first.stage, name, first.key.step));
  }
  if (first.ranks.empty() ||
      std::ranges::find(expected.ranks, first.ranks.front()) == expected.ranks.end())
    return fmt::format("the first rank must be one of {}, got {}", fmt::join(expected.ranks, ", "),
                       fmt::join(first.ranks, ", "));
  if (first.diagnosis.find(expected.diagnosis) == std::string::npos)
    return fmt::format("the cause must be '{}', got '{}'", expected.diagnosis, first.diagnosis);
  return "";
}

Report detect_faults(const std::vector<std::string>& ids, VerifyObserver& observer) {
  if (ids.empty()) throw UsageError("nothing selected: there is no fault to inject");
  std::vector<const Fault*> faults;
  for (const std::string& id : ids) faults.push_back(&find_fault(id));
  warm_up_training({faults.front()->smallest_case()});
  Report report;
  report.environment = settings_in_environment();
  std::size_t found = 0;
  for (const Fault* fault : faults) {
    if (interrupt_signal() != 0) break;
    const ReportCase& added = report.add(judged(*fault, observer));
    found += added.detection.has_value() && added.detection->is_right ? 1 : 0;
    observer.on_judged(added);
  }
  if (interrupt_signal() != 0) report.exit_code = 128 + interrupt_signal();
  report.summary = fmt::format("{} of {} as the catalog says", found, faults.size());
  return report;
}

}  // namespace isoshard
