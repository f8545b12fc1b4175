// SPDX-License-Identifier: Apache-2.0
/// Gradient clipping by the global norm.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "subjects/optim/optimizer.h"

namespace isoshard {

/// The number of elements of a gradient that are squared and added at a time, in row-major order.
inline constexpr std::int64_t kNormBlockElements = 1 << 16;

/// Sum of squares of all gradients in fp64, in name order; of each gradient block by block, so that
/// no copy of it in fp64 is made.
[[nodiscard]] double sum_of_squares(const NamedTensors& gradients);

/// max_norm / (norm + 1e-6), at most 1 (torch.nn.utils.clip_grad_norm_); 1 if max_norm is 0.
[[nodiscard]] double clip_factor(double norm, double max_norm) noexcept;

/// Multiplies every gradient by `factor` in place; nothing happens for 1.
void scale_gradients(NamedTensors& gradients, double factor);

}  // namespace isoshard
