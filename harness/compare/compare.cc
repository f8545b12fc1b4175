// SPDX-License-Identifier: Apache-2.0
/// Pairs of bundles, or two curves.
#include "harness/compare/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "harness/compare/dumped_runs.h"
#include "harness/judge/first_cause.h"
#include "harness/report/summary.h"
#include "harness/world/machine.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

struct LossGap {
  double size = 0;
  int step = 0;
};

/// The largest of the steps that both have.
LossGap loss_gap(const Curve& reference, const Curve& actual) {
  LossGap gap;
  for (std::size_t i = 0; i < std::min(reference.steps.size(), actual.steps.size()); ++i) {
    const double difference = std::fabs(actual.steps[i].loss - reference.steps[i].loss);
    if (difference > gap.size) gap = {difference, reference.steps[i].step};
  }
  return gap;
}

/// Two subjects' curves, and nothing says how far roundings move them: a gap that bounds may allow
/// proves nothing.
bool is_unknown(const Curve& reference, const Curve& actual, const CurveBounds& bounds,
                const LossGap& gap) {
  const bool has_bounds = bounds.rtol.has_value() || !reference.spreads.empty();
  if (has_bounds || reference.subject == actual.subject ||
      reference.steps.size() != actual.steps.size())
    return false;
  return std::all_of(actual.steps.begin(), actual.steps.end(),
                     [](const CurveStep& step) { return is_finite(step); }) &&
         gap.size <= bounds.ceiling;
}

/// Where settings may differ, the dtypes of the judged curve allow no more than those of the
/// trusted one.
CurveBounds bounds_for(const ComparePlan& plan, const Curve& reference, const Curve& actual) {
  if (!plan.bounds_of) return {};
  CurveBounds bounds = plan.bounds_of(actual);
  Curve with_trusted_settings = actual;
  with_trusted_settings.settings = reference.settings;
  bounds.ceiling = std::min(bounds.ceiling, plan.bounds_of(with_trusted_settings).ceiling);
  return bounds;
}

/// The reference's perturbed runs say what is allowed, or rtol, or nothing is.
ReportCurve compare_curves(const ComparePlan& plan) {
  const Curve reference = read_curve(plan.reference);
  ReportCurve result;
  result.curve = read_curve(plan.actual);
  const Curve& actual = result.curve;
  result.name = actual.case_slug;
  if (!plan.allows_different_settings) refuse_different_settings(reference, actual);
  if (plan.rtol.has_value() && !reference.spreads.empty())
    throw UsageError(
        "--rtol must be left out: the perturbed runs of the reference already say how far a loss "
        "curve may be from it");
  CurveBounds bounds = bounds_for(plan, reference, actual);
  bounds.rtol = plan.rtol;
  CurveVerdict verdict = judge_curve(reference, actual, bounds);
  const LossGap gap = loss_gap(reference, actual);
  if (verdict.first.has_value() && is_unknown(reference, actual, bounds, gap)) {
    verdict.status = Status::kVacuous;
    verdict.reason = fmt::format(
        "the curves differ, and nothing says how far roundings alone move them: {} has no "
        "perturbed runs. Compare with the loss_reference.json of isoshard train, or give --rtol. "
        "First difference: {}",
        label_of(reference), verdict.reason);
  }
  if (verdict.first.has_value() && gap.size > 0)
    result.remarks.push_back(fmt::format(
        "          largest difference of the loss: {:.3g} in step {}", gap.size, gap.step));
  result.remarks.push_back(fmt::format(
      "          that this is a curve of {} is its own word, by which published bounds were chosen",
      actual.subject));
  result.verdict = std::move(verdict);
  return result;
}

/// A missing file that has the name of a curve counts as one: reading it says that it is missing.
bool names_a_curve(const fs::path& path) {
  std::error_code ignored;
  return is_curve_file(path) || (path.extension() == ".json" && !fs::exists(path, ignored));
}

bool are_curves(const ComparePlan& plan) {
  if (plan.are_checkpoints || !plan.input_dir.empty() || plan.reference.empty() ||
      plan.actual.empty())
    return false;
  const bool first = names_a_curve(plan.reference), second = names_a_curve(plan.actual);
  if (first != second)
    throw UsageError(
        "compare takes two bundles or two loss curves (loss_SUBJECT.json), not one of each");
  return first;
}

DumpedRuns runs_of(const ComparePlan& plan) {
  if (!plan.input_dir.empty()) return dumped_pairs(plan.input_dir, plan.rules.batch_file);
  return {.pairs = {{plan.reference, plan.actual}}};
}

Verdict compare_pair(const DumpedPair& pair, const ComparePlan& plan, const BundleRules& rules) {
  if (!plan.are_checkpoints) {
    JudgePolicy options;
    options.rtol = plan.rtol;
    Verdict verdict = compare_bundles(pair.reference, pair.actual, options, rules, plan.comparer);
    add_given_findings(plan.given, verdict);
    detail::stop_at_wrong_data(verdict);
    if (!pair.against.empty()) verdict.reason += "; against " + pair.against;
    return verdict;
  }
  CheckpointRules checkpoint = plan.checkpoint;
  checkpoint.rtol = plan.rtol;
  checkpoint.not_recorded = rules.not_recorded;
  return compare_checkpoints(pair.reference, pair.actual, checkpoint, plan.comparer);
}

}  // namespace

void require_comparable(const ComparePlan& plan) {
  if (plan.rtol.has_value() && !(*plan.rtol >= 0 && *plan.rtol < 1))
    throw UsageError(
        fmt::format("--rtol must be 0 or more and below 1, got {}: at 1 a run of zeros would pass",
                    *plan.rtol));
  if (plan.are_checkpoints && (plan.reference.empty() || plan.actual.empty())) {
    throw UsageError(
        "compare --checkpoint needs two checkpoints: isoshard compare --checkpoint REFERENCE "
        "ACTUAL");
  }
  const bool has_given = !plan.given.empty();
  if (!plan.input_dir.empty()) {
    if (has_given) throw UsageError("--findings must come with two bundles, got --input-dir");
    if (!plan.reference.empty())
      throw UsageError("compare takes two bundles or --input-dir DIR, not both");
  } else if (plan.reference.empty() || plan.actual.empty()) {
    throw UsageError(
        "compare needs two bundles: isoshard compare REFERENCE ACTUAL; or --input-dir DIR");
  } else if (are_curves(plan) && has_given) {
    throw UsageError("--findings must come with two bundles, got two loss curves");
  } else if (are_curves(plan) && plan.comparer != nullptr) {
    throw UsageError(
        "--device must be cpu where two loss curves are compared, got cuda: they have no tensors");
  }
}

Report compare(const ComparePlan& plan, const CompareObserver& observer) {
  require_comparable(plan);
  Report report;
  report.environment = settings_in_environment();
  if (are_curves(plan)) {
    if (plan.require != Strength::kNone)
      throw UsageError("--require is about bundles: a loss curve alone is never exact evidence");
    const ReportCurve& added = report.add(compare_curves(plan));
    if (observer.on_curve) observer.on_curve(added);
    report.summary = summary_of(report, "curve");
    return report;
  }
  BundleRules rules = plan.rules;
  rules.different =
      plan.allows_different_settings ? DifferentSettings::kAllowed : DifferentSettings::kRefused;
  const DumpedRuns runs = runs_of(plan);
  const std::vector<DumpedPair>& pairs = runs.pairs;
  for (const DumpedPair& pair : pairs) {
    ReportCase item{.name = pair.actual.filename().string()};
    try {
      item.verdict = compare_pair(pair, plan, rules);
      item.name = item.verdict->case_slug;
      require_unchanged_inputs();
      require_strength(item, plan.require);
    } catch (const std::exception& error) {
      if (pairs.size() == 1) throw;
      set_failure(item, error);  // the other pairs keep their verdicts
    }
    const ReportCase& added = report.add(std::move(item));
    if (observer.on_case) observer.on_case(added);
  }
  report.summary = summary_of(report);
  if (const std::string words = words_of(runs.not_judged); !words.empty())
    report.summary += "; " + words;
  return report;
}

}  // namespace isoshard
