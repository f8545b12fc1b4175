// SPDX-License-Identifier: Apache-2.0
// Means over steps.
#include "suite/converge/curve_distance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/error.h"

namespace isoshard {
namespace {

/// Of the mean loss (norms: of 1): one ulp of fp32. What differs by less on average is equal.
constexpr double kFloor = 0x1p-23;

bool is_of_norms(CurveNumber number) {
  return number == CurveNumber::kNorm || number == CurveNumber::kNormOffset;
}

bool is_root_of_squares(CurveNumber number) {
  return number == CurveNumber::kLoss || number == CurveNumber::kNorm;
}

double relative(double control, double run) {
  return control == run ? 0 : run / control - 1;
}

std::size_t first_step(CurveNumber number, std::size_t steps) {
  return number == CurveNumber::kFinalLoss ? steps - num_final_steps(steps) : 0;
}

double mean_loss(const Curve& curve, std::size_t first, std::size_t end) {
  double sum = 0;
  for (std::size_t i = first; i < end; ++i) sum += curve.steps[i].loss;
  return sum / static_cast<double>(end - first);
}

/// The spread of a number over the first `steps` steps.
double spread_of(CurveNumber number, const Curve& control, std::span<const Curve> perturbed,
                 std::size_t steps) {
  double largest = 0;
  for (const Curve& run : perturbed)
    largest = std::max(largest, std::fabs(measure(number, control, run, steps)));
  return largest;
}

/// Of whole curves.
CurveBounds whole_bounds(const Curve& control, CurveBounds bounds) {
  if (num_judged_steps(control, bounds) < control.steps.size())
    bounds.ceiling = CurveBounds{}.ceiling;
  return bounds;
}

double allowed_of(CurveNumber number, double spread, const Curve& control, std::size_t steps,
                  const CurveBounds& bounds) {
  const double unit = is_of_norms(number) ? 1 : std::fabs(mean_loss(control, 0, steps));
  const double allowed = std::max(bounds.factor * spread, kFloor * unit);
  return is_of_norms(number) ? allowed : std::min(allowed, bounds.ceiling);
}

void require_steps(const Curve& control, std::span<const Curve> perturbed) {
  if (perturbed.empty())
    throw UsageError(
        "a curve's distance is held to perturbed runs of its control, and there are none; train "
        "the control with --perturbed-runs 1 or more");
  for (const Curve& run : perturbed) {
    if (run.steps.size() != control.steps.size() || run.steps.empty())
      throw UsageError(fmt::format("a perturbed run must have the {} steps of the control, got {}",
                                   control.steps.size(), run.steps.size()));
  }
}

}  // namespace

std::string_view name_of(CurveNumber number) noexcept {
  switch (number) {
    case CurveNumber::kLoss:
      return "loss";
    case CurveNumber::kLossOffset:
      return "loss offset";
    case CurveNumber::kFinalLoss:
      return "final loss";
    case CurveNumber::kNorm:
      return "gradient norm";
    case CurveNumber::kNormOffset:
      break;
  }
  return "gradient norm offset";
}

std::size_t num_judged_steps(const Curve& control, const CurveBounds& bounds) {
  for (std::size_t i = 0; i < control.spreads.size(); ++i) {
    if (!(bounds.factor * control.spreads[i].loss <= bounds.ceiling)) return i;
  }
  return control.steps.size();
}

std::size_t num_final_steps(std::size_t steps) noexcept {
  return std::max<std::size_t>(1, steps / 10);
}

double final_loss(const Curve& curve) {
  const std::size_t steps = curve.steps.size();
  return mean_loss(curve, steps - num_final_steps(steps), steps);
}

double measure(CurveNumber number, const Curve& control, const Curve& run, std::size_t steps) {
  double sum = 0;
  const std::size_t first = first_step(number, steps);
  for (std::size_t i = first; i < steps; ++i) {
    const CurveStep &a = control.steps[i], &b = run.steps[i];
    const double d = is_of_norms(number) ? relative(a.grad_norm, b.grad_norm) : b.loss - a.loss;
    sum += is_root_of_squares(number) ? d * d : d;
  }
  const double mean = sum / static_cast<double>(steps - first);
  return is_root_of_squares(number) ? std::sqrt(mean) : mean;
}

// NaN is not within anything.
bool CurveDistance::is_within() const noexcept {
  return std::fabs(value) <= allowed;
}

std::vector<CurveDistance> distances_of(const Curve& control, std::span<const Curve> perturbed,
                                        const Curve& run, const CurveBounds& bounds) {
  require_steps(control, perturbed);
  const std::size_t steps = control.steps.size();
  if (run.steps.size() != steps)
    throw UsageError(fmt::format("a judged run must have the {} steps of the control, got {}",
                                 steps, run.steps.size()));
  const CurveBounds whole = whole_bounds(control, bounds);
  std::vector<CurveDistance> distances;
  for (const CurveNumber number : kCurveNumbers) {
    CurveDistance distance{.number = number};
    const auto judge = [&](std::size_t so_far) {
      distance.value = measure(number, control, run, so_far);
      distance.spread = spread_of(number, control, perturbed, so_far);
      distance.allowed = allowed_of(number, distance.spread, control, so_far, whole);
      return distance.is_within();
    };
    if (!judge(steps)) {
      std::size_t seen = 1;
      while (seen < steps && judge(seen)) ++seen;
      distance.seen_from = control.steps[seen - 1].step;
      (void)judge(steps);
    }
    distances.push_back(distance);
  }
  return distances;
}

double least_shift_seen(const Curve& control, std::span<const Curve> perturbed,
                        const CurveBounds& bounds) {
  require_steps(control, perturbed);
  const std::size_t steps = control.steps.size(), quarter = std::max<std::size_t>(1, steps / 4);
  const double share = static_cast<double>(quarter) / static_cast<double>(steps);
  const CurveBounds whole = whole_bounds(control, bounds);
  const auto allowed = [&](CurveNumber number) {
    return allowed_of(number, spread_of(number, control, perturbed, steps), control, steps, whole);
  };
  double least =
      std::min({allowed(CurveNumber::kLoss) / std::sqrt(share),
                allowed(CurveNumber::kLossOffset) / share, allowed(CurveNumber::kFinalLoss)});
  double envelope = 0;
  for (std::size_t i = 0; i < num_judged_steps(control, bounds); ++i) {
    envelope = std::max(envelope, control.spreads.at(i).loss);
    if (i < steps - quarter) continue;
    const double floor = bounds.relative_floor * std::fabs(control.steps[i].loss);
    least = std::min({least, std::max(bounds.factor * envelope, floor), bounds.ceiling});
  }
  return least;
}

}  // namespace isoshard
