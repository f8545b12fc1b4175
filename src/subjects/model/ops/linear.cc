// SPDX-License-Identifier: Apache-2.0
// Products of 16-bit matrices through fp32.
#include "subjects/model/ops/linear.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

namespace isoshard {
namespace {

bool is_16_bit(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

at::Tensor as_matrix(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

// Saves the 16-bit operands and widens them again in backward, so that nothing of twice their size
// lives from forward to backward. The gradients are those of at::linear: products summed in fp32
// and rounded once.
struct WidenedLinear : torch::autograd::Function<WidenedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    context->save_for_backward({x, weight});
    std::optional<at::Tensor> wide_bias;
    if (bias.has_value()) wide_bias = bias->to(at::kFloat);
    context->saved_data["has_bias"] = bias.has_value();
    return at::linear(x.to(at::kFloat), weight.to(at::kFloat), wide_bias).to(x.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved.at(0), &weight = saved.at(1);
    const at::ScalarType dtype = x.scalar_type();
    const at::Tensor gradient = as_matrix(gradients.at(0).to(at::kFloat));
    at::Tensor of_x, of_weight, of_bias;
    if (context->needs_input_grad(0))
      of_x = at::mm(gradient, weight.to(at::kFloat)).to(dtype).view(x.sizes());
    if (context->needs_input_grad(1))
      of_weight = at::mm(gradient.t(), as_matrix(x).to(at::kFloat)).to(dtype);
    // without a bias there is no third edge to ask for
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      of_bias = gradient.sum(0).to(dtype);
    return {of_x, of_weight, of_bias};
  }
};

// What autocast would make of an operand of at::linear.
at::Tensor as_cast(const at::Tensor& operand) {
  const at::DeviceType device = operand.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return operand;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), operand, device);
}

}  // namespace

bool detail::has_product_kernels(at::ScalarType dtype) {
#if defined(__x86_64__)
  // What LibTorch asks before it calls oneDNN, which has these kernels.
  static const bool of_bf16 = __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512vl") &&
                              __builtin_cpu_supports("avx512dq"),
                    of_fp16 = of_bf16 && __builtin_cpu_supports("avx512fp16");
  if (dtype == at::kBFloat16) return of_bf16;
  if (dtype == at::kHalf) return of_fp16;
#endif
  return true;
}

at::Tensor detail::widened_linear(const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias) {
  return WidenedLinear::apply(x, weight, bias);
}

bool detail::is_widened_linear(const torch::autograd::Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<WidenedLinear>*>(&node) != nullptr;
}

at::Tensor apply_linear(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) {
  const at::DeviceType device = x.device().type();
  const bool is_cast = at::autocast::is_autocast_enabled(device);
  // decided before anything is cast: at::linear casts for itself
  if (x.is_cuda() || detail::has_product_kernels(is_cast ? at::autocast::get_autocast_dtype(device)
                                                         : x.scalar_type()))
    return at::linear(x, weight, bias);
  const at::Tensor cast_x = as_cast(x), cast_weight = as_cast(weight);
  const at::ScalarType dtype = cast_x.scalar_type();
  if (!is_16_bit(dtype) || cast_weight.scalar_type() != dtype) return at::linear(x, weight, bias);
  const bool has_bias = bias.has_value() && bias->defined();
  return detail::widened_linear(cast_x, cast_weight,
                                has_bias ? std::optional(as_cast(*bias)) : std::nullopt);
}

}  // namespace isoshard
