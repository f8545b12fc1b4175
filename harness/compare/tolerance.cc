// SPDX-License-Identifier: Apache-2.0
/// From a response to a tolerance.
#include "harness/compare/tolerance.h"

#include <algorithm>
#include <cmath>

namespace isoshard {
namespace {

constexpr double kPartOfCorrelated = 0.1;
constexpr double kFp64Roundings = 32;

}  // namespace

PerturbedTolerance perturbed_tolerance(const Response& response, double k, Dtype coarsest, std::int64_t numel, double reference_norm) {
  const double roundoff = unit_roundoff(coarsest);
  const double root = std::sqrt(static_cast<double>(std::max<std::int64_t>(numel, 1)));
  PerturbedTolerance tolerance;
  // Kernels for other shapes sum in another order, which in fp64 moves a clean gradient by 8 roundoffs where one-ulp changes of
  // the weights move it by 2. In fp64 there is room for it.
  const double roundings = (coarsest == Dtype::kFloat64 ? kFp64Roundings : 1) + 3 / root;
  tolerance.relative_error = std::max(k * response.relative_error, roundoff * roundings);
  // The scale error is the part of the error along the reference. Errors that are independent from element to element, each
  // relative to its element, have a part of error x sqrt(sum r^4) / sum r^2, which max abs(r) / norm(r) bounds: 1 / sqrt(numel)
  // for even tensors, more for second moments that a few elements rule. Errors inside attention are not independent: gradients
  // there are ruled by a few tokens, and clean runs of large tensors had up to 0.17 x error, so 0.1 x (k x response) is allowed.
  // No part is larger than the whole.
  const double peak = reference_norm > 0 ? response.reference_max_abs / reference_norm : 0;
  const double part_along_reference = std::min(1.0, std::max({4 / root, 4 * peak, kPartOfCorrelated}));
  // The scale is a quotient of two fp64 sums of numel terms, each with an error of its own; only fp64 tensors notice.
  const double statistic = (8 + root) * unit_roundoff(Dtype::kFloat64);
  tolerance.scale_error = std::max({k * response.scale_error, roundoff, part_along_reference * tolerance.relative_error, statistic});
  tolerance.absolute = k * response.absolute_norm;
  tolerance.insensitive = reference_norm < response.absolute_norm;
  return tolerance;
}

}  // namespace isoshard
