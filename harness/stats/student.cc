// SPDX-License-Identifier: Apache-2.0
/// The quantile by bisection, with Simpson's rule for the integral.
#include "harness/stats/student.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace isoshard {

double student_quantile(double freedom, double chance) noexcept {
  // With x = sqrt(freedom) tan(a), P(|T| > x) is the share of the integral of cos^(freedom - 1)
  // from a to pi / 2.
  const auto integral = [&](double from) {
    constexpr int kSteps = 2000;  // even, for Simpson's rule
    const double width = (std::numbers::pi / 2 - from) / kSteps;
    double sum = 0;
    for (int i = 0; i <= kSteps; ++i) {
      const double weight = i == 0 || i == kSteps ? 1 : (i % 2 == 1 ? 4 : 2);
      sum += weight * std::pow(std::max(0.0, std::cos(from + i * width)), freedom - 1);
    }
    return sum * width / 3;
  };
  const double whole = integral(0);
  double low = 0, high = std::numbers::pi / 2;
  constexpr int kHalvings = 60;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    (integral(middle) / whole > chance ? low : high) = middle;
  }
  return std::sqrt(freedom) * std::tan(low);
}

}  // namespace isoshard
