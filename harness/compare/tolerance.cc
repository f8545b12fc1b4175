// SPDX-License-Identifier: Apache-2.0
/// From a response to a tolerance.
#include "harness/compare/tolerance.h"

#include <algorithm>
#include <cmath>

namespace isoshard {
namespace {

constexpr double kCosineOfFewTokens = 0.05;

}  // namespace

PerturbedTolerance perturbed_tolerance(const Response& response, double k, Dtype coarsest, std::int64_t numel, double reference_norm) {
  const double roundoff = unit_roundoff(coarsest);
  const double root = std::sqrt(static_cast<double>(std::max<std::int64_t>(numel, 1)));
  PerturbedTolerance tolerance;
  tolerance.relative_error = std::max(k * response.relative_error, roundoff * (1 + 3 / root));
  // An error that is independent from element to element shows as a scale of error / sqrt(numel). Gradients inside attention are
  // ruled by a few tokens, so that theirs is not: a clean run of 100 million parameters had 0.07 x error at 73,728 elements.
  const double cosine_of_unrelated = std::max(4 / root, kCosineOfFewTokens);
  // The scale is a quotient of two fp64 sums of numel terms, each with an error of its own; only fp64 tensors notice.
  const double statistic = (8 + root) * unit_roundoff(Dtype::kFloat64);
  tolerance.scale_error = std::max({k * response.scale_error, roundoff, cosine_of_unrelated * tolerance.relative_error, statistic});
  tolerance.absolute = k * response.absolute_norm;
  tolerance.insensitive = reference_norm < response.absolute_norm;
  return tolerance;
}

}  // namespace isoshard
