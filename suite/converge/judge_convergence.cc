// SPDX-License-Identifier: Apache-2.0
// Steps first, then whole curves.
#include "suite/converge/judge_convergence.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
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

Curve first_steps(Curve curve, std::size_t steps) {
  if (curve.steps.size() > steps) curve.steps.resize(steps);
  if (curve.spreads.size() > steps) curve.spreads.resize(steps);
  return curve;
}

/// What must hold in every step, however far the losses are apart.
std::string problem_of_steps(const Curve& control, const Curve& run) {
  if (run.steps.size() != control.steps.size())
    return fmt::format("it has {} steps, the control {}", run.steps.size(), control.steps.size());
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    const double wanted = control.steps[i].learning_rate, got = run.steps[i].learning_rate;
    if (wanted != got)
      return fmt::format("step {}: the learning rate must be the control's {}, got {}",
                         control.steps[i].step, wanted, got);
  }
  return "";
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

std::string in_words(const SeedDistance& d) {
  return fmt::format(
      "its {} is {:.6g}, the controls' mean {:.6g}; they differ by {:.3e}, at most {:.3e} is "
      "allowed: the controls' own deviation over seeds is {:.3e}",
      d.number, d.value, d.control, std::fabs(d.value - d.control), d.allowed, d.deviation_of);
}

void add_problem(CurveVerdict& verdict, const std::string& problem) {
  const bool was_wrong = verdict.status == Status::kDiverges;
  verdict.status = Status::kDiverges;
  verdict.strength = Strength::kNone;
  verdict.reason = was_wrong ? verdict.reason + "\n          " + problem : problem;
}

}  // namespace

std::string problem_of_control(const PerturbedCase& control) {
  if (std::string own = found_without_reference(control.trained); !own.empty()) return own;
  const Curve& curve = control.trained.curve;
  const CurveBounds bounds = curve_bounds(curve);
  const std::size_t judged = num_judged_steps(curve, bounds);
  if (judged == 0)
    return "the case is chaotic: in the first step runs that differ by one ulp of every weight are "
           "further apart than is ever allowed; use a smaller learning rate or a larger batch";
  if (std::string chaos = chaos_of(first_steps(curve, judged), bounds); !chaos.empty())
    return chaos;
  double apart = 0;
  for (const Curve& run : control.perturbed) {
    if (run.steps.size() != curve.steps.size()) return "a perturbed run did not end";
    apart = std::max(apart, measure(CurveNumber::kLoss, curve, run, curve.steps.size()));
  }
  constexpr double kCeiling = CurveBounds{}.ceiling;
  if (bounds.factor * apart <= kCeiling) return "";
  return fmt::format(
      "the case is chaotic: as whole curves, runs that differ by one ulp of every weight are "
      "{:.3g} "
      "apart, of which {:g} times is more than the {:g} that is ever allowed; use a smaller "
      "learning rate or fewer steps",
      apart, bounds.factor, kCeiling);
}

ConvergenceVerdict judge_convergence(const PerturbedCase& control, const TrainedCase& run,
                                     bool shares_batches) {
  const Curve& wanted = control.trained.curve;
  const CurveBounds bounds = curve_bounds(wanted);
  const std::size_t judged = num_judged_steps(wanted, bounds);
  ConvergenceVerdict result;
  result.verdict.label = label_of(run.curve);
  result.verdict.reason = problem_of_control(control);
  if (!result.verdict.reason.empty()) return result;
  result.verdict = judge_steps(first_steps(wanted, judged), first_steps(run.curve, judged), bounds,
                               shares_batches);
  if (const std::string problem = problem_of_steps(wanted, run.curve); !problem.empty())
    add_problem(result.verdict, problem);
  if (judged < wanted.steps.size() && result.verdict.status == Status::kConforms)
    result.verdict.reason += fmt::format(
        "; from step {} on right runs are further apart than single steps may be, and whole curves "
        "are compared",
        wanted.steps[judged].step);
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

std::vector<ConvergenceVerdict> judge_over_seeds(std::span<const Curve> controls,
                                                 std::span<const TrainedCase> runs) {
  std::vector<Curve> ended;
  for (const TrainedCase& run : runs) {
    if (run.curve.steps.size() == controls.front().steps.size()) ended.push_back(run.curve);
  }
  std::vector<SeedDistance> distances;
  if (!ended.empty()) distances = seed_distances(controls, ended);
  std::vector<ConvergenceVerdict> verdicts;
  std::size_t place = 0;  // among the runs that ended
  for (const TrainedCase& run : runs) {
    ConvergenceVerdict result;
    CurveVerdict& verdict = result.verdict;
    verdict.label = label_of(run.curve);
    verdict.steps = static_cast<int>(run.curve.steps.size());
    verdict.status = Status::kConforms;
    verdict.strength = Strength::kWithinTolerance;
    const bool has_ended = run.curve.steps.size() == controls.front().steps.size();
    if (has_ended) ++place;
    for (const SeedDistance& distance : distances) {
      const bool is_of_all = distance.run == 0;
      if (!is_of_all && (!has_ended || distance.run != place)) continue;
      result.over_seeds.push_back(distance);
      if (!distance.is_within()) add_problem(verdict, in_words(distance));
    }
    if (const std::string own = found_without_reference(run); !own.empty())
      add_problem(verdict, own);
    if (verdict.status == Status::kConforms)
      verdict.reason = fmt::format("{} steps; over seeds it ends where {} controls do",
                                   verdict.steps, controls.size());
    verdicts.push_back(std::move(result));
  }
  return verdicts;
}

}  // namespace isoshard
