// SPDX-License-Identifier: Apache-2.0
// The analytic bound of row-parallel products.
#include "suite/published/row_bound.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <limits>

#include "core/base/error.h"

namespace isoshard {
namespace {

double gamma(double count, double unit) {
  return count * unit / (1 - count * unit);
}

// What one partial is multiplied by at most on its way through the sum over ranks: roundings in the
// accumulator and in the dtype.
double factor_of_sum(int tp, ReductionOrder order, double unit, double accumulator_unit) {
  if (tp == 1) return 1;
  switch (order) {
    case ReductionOrder::kOrdered:
      return (1 + gamma(tp - 1, accumulator_unit)) * (unit == accumulator_unit ? 1 : 1 + unit);
    case ReductionOrder::kRing:
      return 1 + gamma(tp - 1, unit);
    case ReductionOrder::kTree:
      return 1 + gamma(std::bit_width(static_cast<unsigned>(tp - 1)), unit);
    case ReductionOrder::kNative:
      break;
  }
  throw UsageError(
      "reduction order native has no formula and so no bound; use ordered, ring or tree");
}

}  // namespace

at::Tensor row_parallel_bound(const at::Tensor& x_MK, const at::Tensor& weight_NK, int tp,
                              Dtype dtype, ReductionOrder order) {
  const std::int64_t terms = x_MK.size(1);
  if (tp < 1 || terms % tp != 0)
    throw UsageError(
        fmt::format("the terms of a reduction must be divisible into {} parts, got {}", tp, terms));
  if (!is_floating(dtype))
    throw UsageError(
        fmt::format("the dtype of a bound must be floating-point, got {}", name_of(dtype)));
  const bool narrow = dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16;
  const double unit = unit_roundoff(dtype),
               accumulator_unit = narrow ? unit_roundoff(Dtype::kFloat32) : unit;
  const double store = narrow ? 1 + unit : 1;  // the rounding of a GEMM's output to its dtype
  const double sum = factor_of_sum(tp, order, unit, accumulator_unit);
  const double in_gemm = gamma(static_cast<double>(terms), accumulator_unit),
               in_part = gamma(static_cast<double>(terms) / tp, accumulator_unit);

  const at::Tensor x = x_MK.to(at::kDouble), weight = weight_NK.to(at::kDouble);
  const at::Tensor magnitudes = at::matmul(x.abs(), weight.abs().t());
  at::Tensor whole = at::zeros_like(magnitudes), partials = at::zeros_like(magnitudes);
  const std::vector<at::Tensor> xs = x.chunk(tp, 1), weights = weight.chunk(tp, 1);
  for (std::size_t r = 0; r < xs.size(); ++r) {
    const at::Tensor partial = at::matmul(xs[r], weights[r].t());
    whole += partial;
    partials += partial.abs();
  }
  // What the stores and the sum over ranks add is relative to the values they round; what the GEMMs
  // add, to the magnitudes.
  const at::Tensor of_whole = whole.abs() * (store - 1) + magnitudes * (in_gemm * store);
  const at::Tensor of_parts = partials * (store * sum - 1) + magnitudes * (in_part * store * sum);
  return of_whole + of_parts;
}

double share_of_bound(const at::Tensor& reference, const at::Tensor& actual,
                      const at::Tensor& bound) {
  const at::Tensor gap = (actual.to(at::kDouble) - reference.to(at::kDouble)).abs();
  const at::Tensor share = at::where(gap.eq(0), at::zeros_like(gap), gap / bound);
  const double largest = share.max().item<double>();
  return std::isnan(largest) ? std::numeric_limits<double>::infinity() : largest;
}

}  // namespace isoshard
