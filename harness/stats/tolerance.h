// SPDX-License-Identifier: Apache-2.0
/// The perturbed level: how far a run may be from the reference, derived from the reference's own
/// response to one-ulp changes of its weights (docs/internals/design.md section 6).
#pragma once
#include <cstdint>

#include "core/base/dtype.h"
#include "harness/stats/response.h"

namespace isoshard {

struct PerturbedTolerance {
  double relative_error = 0;  ///< max(r x response, rounding_floor), r = responses_allowed
  /// Max(r x response, 2 (fp32 and fp64: 4) unit roundoffs, p x relative_error, (8 + sqrt(numel)) x
  /// 2^-53);
  double scale_error = 0;
  /// P = max(4 / sqrt(numel), 4 x max abs / norm of the reference, 0.1), at most 1.
  double part_along_reference = 1;
  double absolute = 0;  ///< r x largest absolute response, for insensitive tensors
  /// The reference's norm is below twice its largest absolute response: it is rounding noise itself
  bool insensitive = false;
  /// The reference is below the dtype's least normal number. Never set in fp16.
  bool subnormal = false;
};

/// How many responses a run may differ by: k, and 2.1 k in fp64 and fp32, where the sums of other
/// kernels may round more than the reference's (docs/internals/tolerances.md).
[[nodiscard]] double responses_allowed(double k, Dtype coarsest) noexcept;

/// By how much more than 3 responses the error of `numel` independent elements must be allowed to
/// be, so that it exceeds the largest of three responses in one of 10^6 correct tensors; 1 from 15
/// elements on. Three draws of few elements may all be near 0.
[[nodiscard]] double few_elements_factor(std::int64_t numel) noexcept;

/// The relative error that the last roundings of every element in each of two runs make, whatever
/// the responses say: two unit roundoffs in bf16 and fp16, four in fp32 and fp64; two (fp64: six)
/// more for a single number, whose three responses may all be near 0 by chance.
[[nodiscard]] double rounding_floor(Dtype coarsest, std::int64_t numel) noexcept;

/// The smallest positive number of a floating dtype, a subnormal one; 0 for integers and bool.
[[nodiscard]] double least_positive(Dtype dtype) noexcept;

/// The smallest positive number of a floating dtype that has all its digits.
[[nodiscard]] double least_normal(Dtype dtype) noexcept;

/// Frobenius norm of k times the rounding of subnormal numbers, of every element. What is left of a
/// small gradient there depends on the factor that it carries, and with dp ranks it carries dp.
/// It matters in fp16, and in other dtypes for tensors below their least normal number.
[[nodiscard]] double underflow_floor(double k, Dtype coarsest, std::int64_t numel) noexcept;

/// Parameters after the step of an Adam-like optimizer are judged where the gradient is above this
/// many allowed responses. Then the relative error of an element's step is at most 1 /
/// gradient_margin, which is at most the ceiling of the scale sensitivity: 2^31 in fp64, 2^10 in
/// fp32. In bf16 and fp16 1: few gradients are further above their responses.
[[nodiscard]] double gradient_margin(Dtype coarsest) noexcept;

/// What such a step may be off by in each element, relative to the largest step, whatever the
/// responses say: 2^-31 in fp64, where few elements rule the error and three responses say little
/// of it; else 0.
[[nodiscard]] double step_floor(Dtype coarsest) noexcept;

/// `coarsest` is the coarsest dtype on the tensor's path (the case's dtype).
[[nodiscard]] PerturbedTolerance perturbed_tolerance(const Response& response, double k,
                                                     Dtype coarsest, std::int64_t numel,
                                                     double reference_norm);

}  // namespace isoshard
