// SPDX-License-Identifier: Apache-2.0
/// Tensors that are one unit in the last place (ulp) away from others, which show how far a
/// computation moves when its input does.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace isoshard {

/// A copy of `tensor` in which every element is the next larger or the next smaller value of its
/// dtype. A random bit of (seed, name, flat index) says which. Zero moves to the smallest subnormal
/// of either sign, the largest finite value to the one below it; infinities and NaN stay.
///
/// Give each weight of a model its name: two tensors of one seed and one name move alike.
/// Shapes        that of `tensor`; the copy is contiguous and has no gradient.
/// Ranks         local.
/// Errors        ShapeError unless it is fp64, fp32, bf16 or fp16 in CPU memory.
/// Determinism   the same bits on every machine.
///
///     weight = moved_by_an_ulp(weight, 1, "layer.weight");
[[nodiscard]] at::Tensor moved_by_an_ulp(const at::Tensor& tensor, std::uint64_t seed,
                                         std::string_view name = "");

/// The same for a part of a tensor of shape `shape` that begins at `offset`: the part of the whole
/// one that was moved.
/// Errors   also ShapeError unless the box lies in the tensor.
[[nodiscard]] at::Tensor moved_box_by_an_ulp(const at::Tensor& box, at::IntArrayRef shape,
                                             at::IntArrayRef offset, std::uint64_t seed,
                                             std::string_view name);

}  // namespace isoshard
