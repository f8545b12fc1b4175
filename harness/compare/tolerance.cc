// SPDX-License-Identifier: Apache-2.0
/// From a response to a tolerance.
#include "harness/compare/tolerance.h"

#include <algorithm>
#include <cmath>

namespace isoshard {

PerturbedTolerance perturbed_tolerance(const Response& response, double k, Dtype coarsest, std::int64_t numel, double reference_norm) {
  const double roundoff = unit_roundoff(coarsest);
  const double root = std::sqrt(static_cast<double>(std::max<std::int64_t>(numel, 1)));
  PerturbedTolerance tolerance;
  tolerance.relative_error = std::max(k * response.relative_error, roundoff * (1 + 3 / root));
  // The scale is a quotient of two fp64 sums of numel terms, each with an error of its own; only fp64 tensors notice.
  const double statistic = (8 + root) * unit_roundoff(Dtype::kFloat64);
  tolerance.scale_error = std::max({k * response.scale_error, roundoff, 4 * tolerance.relative_error / root, statistic});
  tolerance.absolute = k * response.absolute_norm;
  tolerance.insensitive = reference_norm < response.absolute_norm;
  return tolerance;
}

}  // namespace isoshard
