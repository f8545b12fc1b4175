// SPDX-License-Identifier: Apache-2.0
/// From a response to a tolerance.
#include "harness/stats/tolerance.h"

#include <algorithm>
#include <cmath>

namespace isoshard {
namespace {

constexpr double kPartOfCorrelated = 0.1;
constexpr double kLanes = 8;
// Noise moves by sqrt(2) of its own norm from run to run; its squares (second moments) by down to
// half of it.
constexpr double kNoiseOfTwoRuns = 2;

/// Of one element in one run: the last factor and the product; of 16-bit floats, which are computed
/// in fp32, the result.
double roundings_of(Dtype coarsest) noexcept {
  return size_of(coarsest) == 2 ? 1 : 2;
}

}  // namespace

double responses_allowed(double k, Dtype coarsest) noexcept {
  // A sum of K terms in one accumulator has a rounding error of u sqrt(K / 6) (rms, of independent
  // terms), in L accumulators that over sqrt(L). The response is the difference of two runs of the
  // better kernel, sqrt(2) of its error; a run with the worse one is sqrt(1 + L) of it away. 16-bit
  // floats are summed in fp32, so there both are below the rounding of the result.
  return size_of(coarsest) == 2 ? k : k * std::sqrt((1 + kLanes) / 2);
}

double few_elements_factor(std::int64_t numel) noexcept {
  // Of n normal elements of equal size x = |error|^2 has the chi-squared distribution of n degrees
  // of freedom. A response is below |error| / t with probability (x / 2 t^2)^(n/2) / G(n/2 + 1) at
  // most, and three of them with the cube of that; its mean over x is
  // G(2n) / (G(n/2) G(n/2 + 1)^3) t^(-3n).
  constexpr double kFalseAlarm = 1e-6, kMostElements = 64;
  const double n = std::clamp(static_cast<double>(numel), 1.0, kMostElements);
  const double log_of_mean = std::lgamma(2 * n) - std::lgamma(n / 2) - 3 * std::lgamma(n / 2 + 1);
  return std::max(1.0, std::exp((log_of_mean - std::log(kFalseAlarm)) / (3 * n)) / 3);
}

double rounding_floor(Dtype coarsest, std::int64_t numel) noexcept {
  // Not less for many elements: one large value that many elements share is rounded the same way in
  // all of them. Losses and norms are summed in fp64 whatever the dtype, so only in fp64 are the
  // roundings of these sums of the size of the floor.
  const double of_single_number = coarsest == Dtype::kFloat64 ? 6 : 2;
  return unit_roundoff(coarsest) *
         (2 * roundings_of(coarsest) +
          of_single_number / std::sqrt(static_cast<double>(std::max<std::int64_t>(numel, 1))));
}

double least_positive(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kFloat16:
      return 0x1p-24;
    case Dtype::kBFloat16:
      return 0x1p-133;
    case Dtype::kFloat32:
      return 0x1p-149;
    case Dtype::kFloat64:
      return 0x1p-1074;
    default:
      return 0;
  }
}

double underflow_floor(double k, Dtype coarsest, std::int64_t numel) noexcept {
  return k / 2 * std::sqrt(static_cast<double>(numel)) * least_positive(coarsest);
}

double least_normal(Dtype dtype) noexcept {
  return least_positive(dtype) / (2 * unit_roundoff(dtype));
}

double gradient_margin(Dtype coarsest) noexcept {
  return coarsest == Dtype::kFloat64 ? 0x1p31 : coarsest == Dtype::kFloat32 ? 0x1p10 : 1;
}

double step_floor(Dtype coarsest) noexcept {
  return coarsest == Dtype::kFloat64 ? 1 / gradient_margin(coarsest) : 0;
}

PerturbedTolerance perturbed_tolerance(const Response& response, double k, Dtype coarsest,
                                       std::int64_t numel, double reference_norm) {
  const double roundoff = unit_roundoff(coarsest);
  const double responses = responses_allowed(k, coarsest);
  const double root = std::sqrt(static_cast<double>(std::max<std::int64_t>(numel, 1)));
  PerturbedTolerance tolerance;
  const double underflow =
      reference_norm > 0 ? underflow_floor(k, coarsest, numel) / reference_norm : 0;
  tolerance.relative_error =
      std::max({responses * response.relative_error, rounding_floor(coarsest, numel), underflow});
  // The scale error is the part of the error along the reference. Errors that are independent from
  // element to element, each relative to its element, have a part of error x sqrt(sum r^4) / sum
  // r^2, which max abs(r) / norm(r) bounds: 1 / sqrt(numel) for even tensors, more for second
  // moments that a few elements rule. Errors inside attention are not independent: gradients there
  // are ruled by a few tokens, and clean runs of large tensors had up to 0.17 x error, so 0.1 x (k
  // x response) is allowed. No part is larger than the whole.
  const double peak = reference_norm > 0 ? response.reference_max_abs / reference_norm : 0;
  tolerance.part_along_reference = std::min(1.0, std::max({4 / root, 4 * peak, kPartOfCorrelated}));
  // The scale is a quotient of two fp64 sums of numel terms, each with an error of its own; only
  // fp64 tensors notice.
  const double statistic = (8 + root) * unit_roundoff(Dtype::kFloat64);
  tolerance.scale_error =
      std::max({responses * response.scale_error, 2 * roundings_of(coarsest) * roundoff,
                tolerance.part_along_reference * tolerance.relative_error, statistic});
  tolerance.absolute =
      std::max(responses * response.absolute_norm, underflow_floor(k, coarsest, numel));
  // fp16 works with subnormal numbers. In other dtypes a tensor of them shows as little as zeros.
  tolerance.subnormal = coarsest != Dtype::kFloat16 && reference_norm > 0 &&
                        reference_norm < root * least_normal(coarsest);
  const double underflow_noise =
      coarsest == Dtype::kFloat16 ? underflow_floor(1, coarsest, numel) : 0;
  tolerance.insensitive =
      reference_norm < kNoiseOfTwoRuns * std::max(response.absolute_norm, underflow_noise);
  return tolerance;
}

}  // namespace isoshard
