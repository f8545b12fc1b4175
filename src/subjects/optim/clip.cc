// SPDX-License-Identifier: Apache-2.0
// Gradient clipping by the global norm.
#include "subjects/optim/clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/tensor/scale.h"

namespace isoshard {

namespace {

double sum_of_squares_of(const at::Tensor& gradient) {
  const at::Tensor flat = gradient.flatten();
  double sum = 0;
  for (std::int64_t first = 0; first < flat.numel(); first += kNormBlockElements) {
    const at::Tensor block =
        flat.narrow(0, first, std::min(kNormBlockElements, flat.numel() - first));
    sum += block.to(at::kDouble).square().sum().item<double>();
  }
  return sum;
}

}  // namespace

double sum_of_squares(const NamedTensors& gradients) {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const auto& [name, gradient] : gradients) {
    if (gradient.defined()) sum += sum_of_squares_of(gradient);
  }
  return sum;
}

double clip_factor(double norm, double max_norm) noexcept {
  if (max_norm == 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;  // a NaN norm gives NaN, as torch's clamp does
}

void scale_gradients(NamedTensors& gradients, double factor) {
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  for (auto& [name, gradient] : gradients) {
    if (gradient.defined()) scale_in_place(gradient, factor);
  }
}

}  // namespace isoshard
