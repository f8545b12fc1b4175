// SPDX-License-Identifier: Apache-2.0
/// From a response to a tolerance.
#include "harness/compare/tolerance.h"

#include <algorithm>
#include <cmath>

namespace isoshard {
namespace {

constexpr double kCosineOfFew = 0.1;
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
  // An error that is independent from element to element shows as a scale of error / sqrt(numel). Gradients inside attention are
  // ruled by a few tokens and second moments by a few elements, so that theirs is not: clean runs had up to 0.17 x error.
  const double cosine_of_unrelated = std::max(4 / root, kCosineOfFew);
  // The scale is a quotient of two fp64 sums of numel terms, each with an error of its own; only fp64 tensors notice.
  const double statistic = (8 + root) * unit_roundoff(Dtype::kFloat64);
  tolerance.scale_error = std::max({k * response.scale_error, roundoff, cosine_of_unrelated * tolerance.relative_error, statistic});
  tolerance.absolute = k * response.absolute_norm;
  tolerance.insensitive = reference_norm < response.absolute_norm;
  return tolerance;
}

}  // namespace isoshard
