// SPDX-License-Identifier: Apache-2.0
/// Rounding a stored tensor to a coarser dtype.
#pragma once
#include "core/base/host_tensor.h"

namespace isoshard {

/// Whether every value of `coarser` is one of `finer`, and both are floating: fp64 to all others,
/// fp32 to both of 16 bits.
[[nodiscard]] bool can_round(Dtype finer, Dtype coarser) noexcept;

/// The tensor with each value rounded to nearest, ties to even; fp64 goes through fp32, as PyTorch
/// rounds it.
/// Requires   can_round(tensor.dtype, dtype).
[[nodiscard]] HostTensor rounded(const HostTensor& tensor, Dtype dtype);

}  // namespace isoshard
