// SPDX-License-Identifier: Apache-2.0
// Runs side by side, and one verdict out of several findings.
#include "suite/train/judge_training.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/cases/setting.h"
#include "harness/run/side_by_side.h"
#include "subjects/registry/curve_ceilings.h"
#include "suite/reference/lattice_guard.h"

namespace isoshard {
namespace {

// In bf16 runs of SGD at 0.1 that differ by roundings are 3 % apart after 30 steps
// (docs/reference/goldens.md).
constexpr double kAdamWLargestRate = 1e-3, kSgdLargestRate = 0.1, kSgdLargestRateIn16Bits = 0.02;

std::string in_words(const NonFiniteStep& found) {
  std::string words = fmt::format("the {} of step {} is {}", found.number, found.step, found.value);
  if (!found.tensor.has_value())
    return words + "; every tensor of the step was finite when it was run again";
  const NonFiniteTensor& t = *found.tensor;
  return words + fmt::format(
                     "; the first tensor that is no number is the {} on rank {}: {} NaN and {} "
                     "infinite of {}",
                     t.name, found.rank, t.nan, t.infinite, t.numel);
}

std::string in_words(const UnequalCopies& found) {
  return fmt::format("ranks {} and {} hold different copies of {}", found.first_rank,
                     found.second_rank, describe(found.key));
}

}  // namespace

namespace {

/// Of the curve of a whole run what is left behind a checkpoint: as if it went on from there.
void keep_rest(Curve& curve, const Case& resumed) {
  const int first = resumed.first_step();
  CurveSpread widest;
  std::vector<CurveStep> steps;
  std::vector<CurveSpread> spreads;
  for (std::size_t i = 0; i < curve.steps.size(); ++i) {
    if (!curve.spreads.empty()) {
      const CurveSpread& own = curve.spreads.at(i);
      widest = {std::max(widest.loss, own.loss), std::max(widest.rank_loss, own.rank_loss),
                std::max(widest.grad_norm, own.grad_norm)};
    }
    if (curve.steps[i].step < first) continue;
    steps.push_back(curve.steps[i]);
    if (!curve.spreads.empty()) spreads.push_back(widest);
  }
  curve.steps = std::move(steps);
  curve.spreads = std::move(spreads);
  const Curve of_rest = untrained_curve(resumed);
  curve.case_slug = of_rest.case_slug;
  curve.settings = of_rest.settings;
  curve.fingerprint = of_rest.fingerprint;
  curve.fingerprint["trained_from"] = "step 0, not from the checkpoint";
}

}  // namespace

PerturbedCase train_perturbed(const Case& item, int perturbed_runs, const TrainOptions& options) {
  std::vector<std::function<TrainingRun()>> starts;
  for (int run = 0; run <= perturbed_runs; ++run) {
    starts.emplace_back([&item, &options, run] {
      TrainOptions own = options;
      own.perturbed_by = static_cast<std::uint64_t>(run);  // the first one is the run itself
      if (run > 0) own.on_step = {};
      return TrainingRun(item, std::move(own));
    });
  }
  std::vector<TrainedCase> runs(starts.size());
  run_side_by_side<TrainingRun>(starts,
                                [&](std::size_t i, TrainingRun& run) { runs[i] = run.wait(); });

  PerturbedCase all;
  all.trained = std::move(runs.front());
  Curve& curve = all.trained.curve;
  bool all_ended = true;
  for (std::size_t i = 1; i < runs.size(); ++i) {
    all_ended = all_ended && !runs[i].non_finite.has_value() &&
                runs[i].curve.steps.size() == curve.steps.size();
    all.perturbed.push_back(std::move(runs[i].curve));
  }
  if (all.perturbed.empty()) return all;
  if (!all_ended) {
    curve.spreads.assign(curve.steps.size(),
                         {kUnboundedSpread, kUnboundedSpread, kUnboundedSpread});
  } else {
    curve.spreads = spreads_of(curve, all.perturbed);
  }
  curve.perturbed_runs = perturbed_runs;
  return all;
}

TrainedCase train_reference(const Case& item, int perturbed_runs, const TrainOptions& options) {
  const Case asked = reference_case(item);
  const bool is_uninterrupted = asked.resumed.has_value() && why_not_one_run(asked).empty();
  const Case reference = is_uninterrupted ? uninterrupted_case(asked) : asked;
  const int num_perturbed = is_lattice(reference) ? 0 : perturbed_runs;
  TrainedCase trained = train_perturbed(reference, num_perturbed, options).trained;
  if (is_uninterrupted) keep_rest(trained.curve, asked);
  return trained;
}

CurveBounds curve_bounds(const Curve& actual) {
  return curve_bounds(actual, kCurveCeilings);
}

double largest_rate(const Case& item) {
  if (item.settings.optimizer.kind == OptimizerSettings::Kind::kAdamW) return kAdamWLargestRate;
  return size_of(item.coarsest_dtype()) < size_of(Dtype::kFloat32) ? kSgdLargestRateIn16Bits
                                                                   : kSgdLargestRate;
}

std::string outside_range(const Case& item) {
  const OptimizerSettings& optimizer = item.settings.optimizer;
  const bool is_adamw = optimizer.kind == OptimizerSettings::Kind::kAdamW;
  const double largest = largest_rate(item);
  if (optimizer.learning_rate > largest)
    return fmt::format(
        "a learning rate of {:g} is above {:g}, the largest for which the bounds of {} curves are "
        "known to hold",
        optimizer.learning_rate, largest, name_of(optimizer.kind));
  if (!is_adamw && item.settings.max_grad_norm == 0)
    return "without clipping (--max-grad-norm) the bounds of sgd curves are not known to hold";
  return "";
}

std::string non_finite_in_words(const TrainedCase& trained) {
  return trained.non_finite.has_value() ? in_words(*trained.non_finite) : "";
}

std::string found_without_reference(const TrainedCase& trained) {
  std::vector<std::string> problems;
  if (trained.unequal_copies.has_value()) problems.push_back(in_words(*trained.unequal_copies));
  if (!trained.unequal_numbers.empty()) problems.push_back(trained.unequal_numbers);
  if (trained.non_finite.has_value()) problems.push_back(in_words(*trained.non_finite));
  return fmt::format("{}", fmt::join(problems, "\n          "));
}

namespace {

/// A run that conforms and breaks a limit which was published for runs like it diverges.
void hold_published_limits(const Curve& reference, const Curve& actual, CurveVerdict& verdict) {
  std::vector<SubjectCurveLimits> limits;
  for (const PublishedCurveLimits& of : kPublishedCurveLimits)
    limits.push_back({of.subject, of.largest, of.mean});
  verdict.published = published_limits(reference, actual, limits);
  const bool all_hold = std::ranges::all_of(verdict.published, &CurveLimit::holds);
  if (all_hold || !are_held(actual) || verdict.status != Status::kConforms) return;
  verdict.status = Status::kDiverges;
  verdict.strength = Strength::kNone;
  verdict.reason = limits_in_words(verdict.published, true) + "; else " + verdict.reason;
}

}  // namespace

CurveVerdict judge_training(const Curve& reference, const TrainedCase& trained) {
  refuse_different_settings(reference, trained.curve);
  CurveVerdict verdict = judge_curve(reference, trained.curve, curve_bounds(trained.curve));
  hold_published_limits(reference, trained.curve, verdict);
  std::string problems = found_without_reference(trained);
  if (problems.empty()) return verdict;
  const bool is_broken = trained.unequal_copies.has_value() || !trained.unequal_numbers.empty();
  // Where the reference itself ends so, the run has shown nothing. Of a run that ended early its
  // length says nothing new.
  const bool is_vacuous = verdict.status == Status::kVacuous && !is_broken;
  if (verdict.first.has_value() || is_vacuous) problems += "\n          " + verdict.reason;
  verdict.status = is_vacuous ? Status::kVacuous : Status::kDiverges;
  verdict.strength = Strength::kNone;
  verdict.reason = std::move(problems);
  return verdict;
}

}  // namespace isoshard
