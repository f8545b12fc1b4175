// SPDX-License-Identifier: Apache-2.0
// Steps first, then whole curves.
#include "suite/converge/judge_convergence.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace isoshard {
namespace {

/// The curve as that of one dp rank that has the global batch.
Curve of_global_batch(Curve curve) {
  curve.settings = "{}";
  curve.mesh = {{"dp", 1}, {"tp", 1}};
  for (CurveStep& step : curve.steps) step.rank_losses = {step.loss};
  for (CurveSpread& spread : curve.spreads) spread.rank_loss = spread.loss;
  return curve;
}

CurveVerdict judge_steps(const Curve& control, const Curve& run, const CurveBounds& bounds,
                         bool shares_batches) {
  if (shares_batches) return judge_curve(control, run, bounds);
  CurveVerdict verdict = judge_curve(of_global_batch(control), of_global_batch(run), bounds);
  verdict.label = label_of(run);
  return verdict;
}

std::string in_words(const CurveDistance& d, int perturbed_runs) {
  return fmt::format(
      "over the whole curve its {} is {:.3e} from the control's, at most {:.3e} is allowed (the "
      "{} perturbed runs of the control: {:.3e}); seen from step {} on",
      name_of(d.number), d.value, d.allowed, perturbed_runs, d.spread, d.seen_from);
}

void add_problem(CurveVerdict& verdict, const std::string& problem) {
  const bool was_wrong = verdict.status == Status::kDiverges;
  verdict.status = Status::kDiverges;
  verdict.strength = Strength::kNone;
  verdict.reason = was_wrong ? verdict.reason + "\n          " + problem : problem;
}

}  // namespace

ConvergenceVerdict judge_convergence(const PerturbedCase& control, const TrainedCase& run,
                                     bool shares_batches) {
  const Curve& wanted = control.trained.curve;
  const CurveBounds bounds = curve_bounds(wanted);
  ConvergenceVerdict result;
  result.verdict = judge_steps(wanted, run.curve, bounds, shares_batches);
  if (result.verdict.status == Status::kVacuous) return result;
  if (result.verdict.first.has_value()) result.seen_from = result.verdict.first->step;
  const auto sees = [&](int step) {
    result.seen_from = result.seen_from < 0 ? step : std::min(result.seen_from, step);
  };
  if (run.curve.steps.size() == wanted.steps.size()) {
    result.distances = distances_of(wanted, control.perturbed, run.curve, bounds);
    result.least_shift = least_shift_seen(wanted, control.perturbed, bounds);
  }
  for (const CurveDistance& distance : result.distances) {
    if (distance.is_within()) continue;
    add_problem(result.verdict, in_words(distance, wanted.perturbed_runs));
    sees(distance.seen_from);
  }
  if (const std::string own = found_without_reference(run); !own.empty()) {
    add_problem(result.verdict, own);
    if (run.non_finite.has_value()) sees(run.non_finite->step);
    if (run.unequal_copies.has_value()) sees(run.unequal_copies->key.step);
  }
  return result;
}

}  // namespace isoshard
