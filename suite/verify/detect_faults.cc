// SPDX-License-Identifier: Apache-2.0
// Verdicts on runs with a fault, against the catalog.
#include "suite/verify/detect_faults.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "fixtures/cases/setting.h"
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

/// Judges faults one after the other; cases of one reference share it.
class FaultJudge {
 public:
  /// The cases in the order in which they will be judged.
  explicit FaultJudge(std::vector<Case> cases)
      : judge_({.reference = ReferenceKind::kAuto, .expects_divergence = true}),
        // As verify --fault: a benign variation is legal, but not what its subject declares.
        benign_judge_({.reference = ReferenceKind::kPlain}) {
    judge_.announce(std::move(cases));
  }

  [[nodiscard]] CaseJudgement judgement_on(const Fault& fault, const Case& item) {
    CaseJudge& judge = fault.expected.has_value() ? judge_ : benign_judge_;
    judge.inject(fault.id);
    return judge.judge_case(item);
  }

 private:
  CaseJudge judge_, benign_judge_;
};

ReportCase judged(FaultJudge& judge, const Fault& fault, const Case& item,
                  VerifyObserver& observer) {
  observer.on_case(item);
  ReportCase result{.name = item.slug(), .fault = fault.id};
  try {
    CaseJudgement judgement = judge.judgement_on(fault, item);
    const std::string problem = missed(fault, judgement.verdict);
    result.detection = ReportDetection{problem.empty(), problem};
    result.verdict = std::move(judgement.verdict);
    result.against = name_of(judgement.against);
  } catch (const std::exception& error) {
    set_failure(result, error);
  }
  return result;
}

bool is_place(const ExpectedDetection& expected, const Finding& first) {
  // of several micro-batches the sum after one of them is named, where that is wrong already
  const std::string name = final_of(first.key).name;
  return first.stage == expected.stage && first.key.step == expected.step &&
         (expected.name.empty() || name == expected.name);
}

/// The fault's smallest case, and the same in the other of fp32 and bf16, if there is such a case.
/// Buckets hold as many elements there, and steps are so large that bf16 keeps them.
std::vector<Case> cases_of(const Fault& fault) {
  constexpr double kLargerStep = 32;
  std::vector<Case> cases{fault.smallest_case()};
  Case other = cases.front();
  if (other.dtype != Dtype::kFloat32 && other.dtype != Dtype::kBFloat16) return cases;
  const bool becomes_bf16 = other.dtype == Dtype::kFloat32;
  TrainSettings& settings = other.settings;
  other.dtype = becomes_bf16 ? Dtype::kBFloat16 : Dtype::kFloat32;
  settings.bucket_bytes = becomes_bf16 ? settings.bucket_bytes / 2 : settings.bucket_bytes * 2;
  settings.master_dtype.reset();
  if (needs_fp32_masters(other)) settings.master_dtype = Dtype::kFloat32;
  if (becomes_bf16 && settings.optimizer.kind == OptimizerSettings::Kind::kSgd)
    settings.optimizer.learning_rate *= kLargerStep;
  try {
    other.validate();
    cases.push_back(std::move(other));
  } catch (const UsageError&) {  // autocast, or a scale of the loss
  }
  return cases;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// What became of the causes of alarms.
struct CauseShares {
  std::size_t right = 0;  ///< the catalog's, at its tensor
  std::size_t at_tensor = 0, elsewhere = 0, none = 0;

  void add(const ReportDetection::Row& row, const Cause& cause) {
    if (row.place && row.cause)
      ++right;
    else if (cause.empty())
      ++none;
    else
      ++(row.place ? at_tensor : elsewhere);
  }
  [[nodiscard]] std::string words() const {
    return fmt::format(
        "causes of alarms: {} right, {} others at the right tensor, {} at another, {} without one",
        right, at_tensor, elsewhere, none);
  }
};

/// Nothing where the fault changes no value and need not: only the catalog's own case must show it.
std::optional<ReportCase> judged_as_row(FaultJudge& judge, const Fault& fault, const Case& item,
                                        bool is_smallest) {
  const auto start = std::chrono::steady_clock::now();
  ReportCase result{.name = item.slug(), .fault = fault.id};
  ReportDetection::Row row{.dtype = std::string(name_of(item.dtype))};
  ReportDetection detection;
  try {
    CaseJudgement judgement = judge.judgement_on(fault, item);
    const Verdict& verdict = judgement.verdict;
    row.alarm = verdict.status == Status::kDiverges && !verdict.findings.empty();
    if (row.alarm && fault.expected.has_value()) {
      const Finding& first = verdict.findings.front();
      row.place = is_place(*fault.expected, first);
      constexpr double kNoise = 0.06;  // in another dtype numbers have other noise
      row.cause = is_smallest ? mismatch(fault.expected->cause, first.cause).empty()
                              : mismatch(fault.expected->cause, first.cause, kNoise).empty();
    }
    if (!row.alarm || !row.place || !row.cause) detection.problem = missed(fault, verdict);
    if (!row.alarm && detection.problem.empty())
      detection.problem = "it must be alarmed, got: " + verdict.reason;
    // in the other dtype a cause is not demanded: noise hides patterns
    detection.is_right = row.alarm && row.place && (row.cause || !is_smallest);
    result.verdict = std::move(judgement.verdict);
    result.against = name_of(judgement.against);
  } catch (const IdleFaultError& error) {
    if (!is_smallest) return std::nullopt;
    set_failure(result, error);
    return result;
  } catch (const std::exception& error) {
    set_failure(result, error);
    return result;
  }
  row.seconds = seconds_since(start);
  detection.row = row;
  result.detection = std::move(detection);
  return result;
}

/// A fault on one case.
struct Injection {
  const Fault* fault = nullptr;
  Case item;
  bool is_smallest = true;  ///< the catalog's own case
};

/// `inject` adds to the report what the run of each gave; a signal ends it.
Report inject_each(
    const std::vector<Injection>& injections,
    const std::function<void(FaultJudge& judge, const Injection&, Report&)>& inject) {
  if (injections.empty()) throw UsageError("nothing selected: there is no fault to inject");
  std::vector<Case> cases;
  for (const Injection& injection : injections) cases.push_back(injection.item);
  warm_up_training(cases);
  FaultJudge judge(std::move(cases));
  Report report;
  report.environment = settings_in_environment();
  for (const Injection& injection : injections) {
    if (interrupt_signal() != 0) break;
    inject(judge, injection, report);
  }
  if (interrupt_signal() != 0) report.exit_code = 128 + interrupt_signal();
  return report;
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
  if (!is_place(expected, first)) {
    const std::string name = final_of(first.key).name;
    return fmt::format("the first finding must be {}, got {}",
                       place_of(expected.stage, expected.name, expected.step),
                       place_of(first.stage, name, first.key.step));
  }
  if (first.ranks.empty() ||
      std::ranges::find(expected.ranks, first.ranks.front()) == expected.ranks.end())
    return fmt::format("the first rank must be one of {}, got {}", fmt::join(expected.ranks, ", "),
                       fmt::join(first.ranks, ", "));
  return mismatch(expected.cause, first.cause);
}

Report detect_faults(const std::vector<std::string>& ids, VerifyObserver& observer) {
  std::vector<Injection> injections;
  for (const std::string& id : ids) {
    const Fault& fault = find_fault(id);
    injections.push_back({&fault, fault.smallest_case()});
  }
  std::size_t found = 0;
  Report report =
      inject_each(injections, [&](FaultJudge& judge, const Injection& injection, Report& into) {
        const ReportCase& added =
            into.add(judged(judge, *injection.fault, injection.item, observer));
        found += added.detection.has_value() && added.detection->is_right ? 1 : 0;
        observer.on_judged(added);
      });
  report.summary = fmt::format("{} of {} as the catalog says", found, ids.size());
  return report;
}

std::string head_of_faults_table() {
  return fmt::format("{:<36} {:<5}  {:<5}  {:<12}  {:<5}  {:>7}\n", "fault", "dtype", "alarm",
                     "first tensor", "cause", "time");
}

Report inject_catalog(const std::vector<std::string>& ids, VerifyObserver& observer) {
  std::vector<Injection> injections;
  for (const std::string& id : ids) {
    const Fault& fault = find_fault(id);
    for (Case& item : cases_of(fault))
      injections.push_back(
          {&fault, std::move(item), injections.empty() || injections.back().fault != &fault});
  }
  std::size_t runs = 0, alarms = 0, places = 0, causes = 0, wrong = 0;
  CauseShares shares;
  std::vector<std::string> without;
  Report report =
      inject_each(injections, [&](FaultJudge& judge, const Injection& injection, Report& into) {
        observer.on_case(injection.item);
        auto result = judged_as_row(judge, *injection.fault, injection.item, injection.is_smallest);
        if (!result.has_value()) {
          without.push_back(
              fmt::format("{} in {}", injection.fault->id, name_of(injection.item.dtype)));
          return;
        }
        const ReportCase& added = into.add(std::move(*result));
        if (added.detection.has_value()) {
          const ReportDetection::Row& row = *added.detection->row;
          ++runs;
          alarms += row.alarm ? 1 : 0;
          places += row.place ? 1 : 0;
          causes += row.cause ? 1 : 0;
          if (row.alarm) shares.add(row, added.verdict->findings.front().cause);
          wrong += added.detection->is_right ? 0 : 1;
        }
        observer.on_judged(added);
      });
  report.summary = fmt::format(
      "{} faults in {} runs: {} alarms, {} with the first tensor and {} with the cause of the "
      "catalog; {} not as they must be; {}",
      ids.size(), runs, alarms, places, causes, wrong, shares.words());
  if (!without.empty())
    report.summary +=
        fmt::format("; not run, as the fault changes nothing there: {}", fmt::join(without, ", "));
  return report;
}

}  // namespace isoshard
