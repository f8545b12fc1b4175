// SPDX-License-Identifier: Apache-2.0
// Student's distribution, and means over seeds.
#include "suite/converge/seed_distance.h"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <numbers>
#include <numeric>

#include "core/base/error.h"
#include "suite/converge/curve_distance.h"

namespace isoshard {
namespace {

/// The chance of abs(T) <= t.
double student_inside(int degrees, double t) {
  const double theta = std::atan(t / std::sqrt(static_cast<double>(degrees)));
  const double cosine = std::cos(theta), sine = std::sin(theta);
  const bool is_odd = degrees % 2 == 1;
  double term = is_odd ? cosine : 1, sum = degrees == 1 ? 0 : term;
  for (int k = is_odd ? 3 : 2; k <= degrees - 2; k += 2) {
    term *= cosine * cosine * (k - 1) / k;
    sum += term;
  }
  return is_odd ? 2 / std::numbers::pi * (theta + sine * sum) : sine * sum;
}

struct Moments {
  double mean = 0, deviation = 0;
};

Moments moments_of(std::span<const double> values) {
  const auto n = static_cast<double>(values.size());
  Moments moments{std::accumulate(values.begin(), values.end(), 0.0) / n, 0};
  double squares = 0;
  for (const double value : values) squares += (value - moments.mean) * (value - moments.mean);
  if (values.size() > 1) moments.deviation = std::sqrt(squares / (n - 1));
  return moments;
}

double mean_loss(const Curve& curve) {
  double sum = 0;
  for (const CurveStep& step : curve.steps) sum += step.loss;
  return sum / static_cast<double>(curve.steps.size());
}

void add_number(const char* name, double (*number)(const Curve&), std::span<const Curve> controls,
                std::span<const Curve> runs, std::vector<SeedDistance>& distances) {
  std::vector<double> wanted, values;
  for (const Curve& curve : controls) wanted.push_back(number(curve));
  for (const Curve& curve : runs) values.push_back(number(curve));
  const Moments control = moments_of(wanted);
  const double quantile =
      student_quantile(static_cast<int>(controls.size()) - 1, kSeedLevel) * control.deviation;
  const double n = static_cast<double>(controls.size()), m = static_cast<double>(runs.size());
  distances.push_back({fmt::format("mean {} of all runs", name), 0, control.mean,
                       moments_of(values).mean, control.deviation,
                       quantile * std::sqrt(1 / n + 1 / m)});
  for (std::size_t i = 0; i < values.size(); ++i)
    distances.push_back(
        {name, i + 1, control.mean, values[i], control.deviation, quantile * std::sqrt(1 / n + 1)});
}

}  // namespace

double student_quantile(int degrees, double level) {
  double low = 0, high = 1;
  while (student_inside(degrees, high) < 1 - level) high *= 2;
  constexpr int kBisections = 200;
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    (student_inside(degrees, middle) < 1 - level ? low : high) = middle;
  }
  return high;
}

// NaN is not within anything.
bool SeedDistance::is_within() const noexcept {
  return std::fabs(value - control) <= allowed;
}

std::vector<SeedDistance> seed_distances(std::span<const Curve> controls,
                                         std::span<const Curve> runs) {
  if (controls.size() < kLeastSeeds)
    throw UsageError(fmt::format(
        "runs with other seeds need at least {} seeds of the control, got {}; name more of them "
        "with --seeds",
        kLeastSeeds, controls.size()));
  if (runs.empty()) throw UsageError("there must be a run with another seed, got none");
  for (const std::span<const Curve> all : {controls, runs}) {
    for (const Curve& curve : all) {
      if (!curve.steps.empty() && curve.steps.size() == controls.front().steps.size()) continue;
      throw UsageError(fmt::format("a run must have the {} steps of the control, got {}",
                                   controls.front().steps.size(), curve.steps.size()));
    }
  }
  std::vector<SeedDistance> distances;
  add_number("final loss", final_loss, controls, runs, distances);
  add_number("loss", mean_loss, controls, runs, distances);
  return distances;
}

}  // namespace isoshard
