// SPDX-License-Identifier: Apache-2.0
// Unscaling, and the flag that all ranks share.
#include "subjects/train/grad_scaler.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "core/tensor/scale.h"

namespace isoshard {

bool GradScaler::unscale(NamedTensors& gradients) const {
  const at::NoGradGuard no_grad;
  const double inverse = static_cast<double>(static_cast<float>(1.0 / scale()));
  bool found = false;
  for (auto& [name, gradient] : gradients) {
    if (!gradient.defined()) continue;
    found = found || !at::isfinite(gradient).all().item<bool>();
    scale_in_place(gradient, inverse);
  }
  return found;
}

bool GradScaler::found_on_any_rank(bool own) {
  double flag = own ? 1 : 0;
  const Buffer buffer{reinterpret_cast<std::byte*>(&flag), 1, Dtype::kFloat64};
  world_->all_reduce(buffer, Reduction::kMax, {Purpose::kClipNorm, Axis::kWorld, {}}).wait();
  return flag != 0;
}

}  // namespace isoshard
