// SPDX-License-Identifier: Apache-2.0
/// The product with a weight, on every CPU in a bearable time.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace isoshard {

/// x W^T + bias as at::linear gives it: summed in fp32 for 16-bit tensors, and rounded once.
///
/// LibTorch has no blocked products of 16-bit matrices on x86 CPUs that lack AVX-512 (for fp16
/// AVX512-FP16): its loops take some hundred times as long as those of fp32. There the operands
/// are widened to fp32, in which they are exact, and the result is rounded. Elsewhere, and on
/// CUDA devices, it is at::linear.
/// Shapes       x [..., I], weight [O, I], bias [O] or none; returns [..., O].
/// Determinism  as at::linear: the order of summation depends on the shapes and the CPU alone.
[[nodiscard]] at::Tensor apply_linear(const at::Tensor& x, const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias = std::nullopt);

namespace detail {

/// Whether LibTorch multiplies matrices of this dtype on this CPU by blocked kernels.
[[nodiscard]] bool has_product_kernels(at::ScalarType dtype);

/// What apply_linear does without such kernels. x and weight are of one 16-bit dtype.
[[nodiscard]] at::Tensor widened_linear(const at::Tensor& x, const at::Tensor& weight,
                                        const std::optional<at::Tensor>& bias);

/// Whether a node of autograd's graph is a widened_linear, whose backward makes those gradients
/// alone that are asked for.
[[nodiscard]] bool is_widened_linear(const torch::autograd::Node& node);

}  // namespace detail

}  // namespace isoshard
