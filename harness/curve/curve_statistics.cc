// SPDX-License-Identifier: Apache-2.0
// The published table.
#include "harness/curve/curve_statistics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/base/reference_name.h"

namespace isoshard {
namespace {

constexpr int kWidth = 60;

std::string own_numbers(const Curve& curve) {
  double least = curve.steps.front().loss, sum = 0;
  for (const CurveStep& step : curve.steps) {
    if (!(step.loss >= least)) least = step.loss;  // a NaN stays
    sum += step.loss;
  }
  return fmt::format(
      "{}:\n  Initial loss: {:.6f}\n  Final loss:   {:.6f}\n  Min loss:     {:.6f}\n  Mean loss:   "
      " {:.6f}\n\n",
      label_of(curve), curve.steps.front().loss, curve.steps.back().loss, least,
      sum / static_cast<double>(curve.steps.size()));
}

/// As the published table has it, with six decimals, but for numbers that these would show as 0.
std::string difference_in_words(double number) {
  if (number == 0) return "0";
  return std::fabs(number) < 1e-4 ? fmt::format("{:.2e}", number) : fmt::format("{:.6f}", number);
}

std::string differences(const Curve& baseline, const Curve& curve) {
  const std::size_t steps = std::min(baseline.steps.size(), curve.steps.size());
  double largest = 0, sum = 0, last = 0;
  for (std::size_t i = 0; i < steps; ++i) {
    last = curve.steps[i].loss - baseline.steps[i].loss;
    if (!(std::fabs(last) <= largest)) largest = std::fabs(last);
    sum += std::fabs(last);
  }
  std::string text = fmt::format("{}:\n", label_of(curve));
  if (baseline.steps.size() != curve.steps.size())
    text += fmt::format("  (over the first {} steps: it has {}, the baseline {})\n", steps,
                        curve.steps.size(), baseline.steps.size());
  return text + fmt::format("  Max abs diff:  {}\n  Mean abs diff: {}\n  Final diff:    {}\n\n",
                            difference_in_words(largest),
                            difference_in_words(sum / static_cast<double>(steps)),
                            difference_in_words(last));
}

}  // namespace

const Curve& baseline_of(std::span<const Curve> curves) {
  for (const std::string_view subject : {kBaselineName, kReferenceName}) {
    for (const Curve& curve : curves) {
      if (curve.subject == subject) return curve;
    }
  }
  return curves.front();
}

std::string statistics_table(std::span<const Curve> curves) {
  const Curve& baseline = baseline_of(curves);
  const std::string line(kWidth, '=');
  std::string text = fmt::format("{}\nLOSS CURVE STATISTICS\n{}\n\n", line, line);
  text += own_numbers(baseline);
  for (const Curve& curve : curves) {
    if (&curve != &baseline) text += own_numbers(curve);
  }
  if (curves.size() == 1) return text;
  text += fmt::format("{}\nDifferences from {} baseline:\n\n", std::string(kWidth, '-'),
                      baseline.title.empty() ? baseline.subject : baseline.title);
  for (const Curve& curve : curves) {
    if (&curve != &baseline) text += differences(baseline, curve);
  }
  text.pop_back();  // the empty line after the last
  return text;
}

}  // namespace isoshard
