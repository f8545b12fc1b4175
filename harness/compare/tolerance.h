// SPDX-License-Identifier: Apache-2.0
/// The perturbed level: how far a run may be from the reference, derived from the reference's own response to one-ulp
/// changes of its weights (docs/design.md section 6).
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "harness/trace/response.h"

namespace isoshard {

struct PerturbedTolerance {
  double relative_error = 0;  ///< max(k x response, unit roundoff x (1 + 3 / sqrt(numel))); in fp64 32 for the 1
  double scale_error = 0;     ///< max(k x response, unit roundoff, p x relative_error, (8 + sqrt(numel)) x 2^-53);
                              ///< p = max(4 / sqrt(numel), 4 x max abs / norm of the reference, 0.1), at most 1
  double absolute = 0;        ///< k x largest absolute response, for insensitive tensors
  bool insensitive = false;   ///< the reference's norm is below its largest absolute response
};

/// Two runs may round every element once more or less, which for many elements averages to about one unit roundoff; a single
/// number has no average (the responses of a loss are three draws that may all be near 0), so its floor is four.
/// `coarsest` is the coarsest dtype on the tensor's path (the case's dtype).
[[nodiscard]] PerturbedTolerance perturbed_tolerance(const Response& response, double k, Dtype coarsest, std::int64_t numel,
                                                     double reference_norm);

}  // namespace isoshard
