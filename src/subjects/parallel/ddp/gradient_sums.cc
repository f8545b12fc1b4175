// SPDX-License-Identifier: Apache-2.0
// Sums of micro-batches.
#include "subjects/parallel/ddp/gradient_sums.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "core/comm/tensor.h"
#include "subjects/parallel/data_parallel.h"

namespace isoshard {

void GradientSums::take(const NamedTensors& leaves) {
  if (!dtype_.has_value()) return;
  const at::NoGradGuard no_grad;
  for (const auto& [name, leaf] : leaves) {
    if (!leaf.grad().defined()) continue;
    const at::Tensor own = leaf.grad().to(scalar_type_of(*dtype_));
    at::Tensor& sum = sums_[name];
    sum = sum.defined() ? sum + own : own;
    leaf.mutable_grad().reset();
  }
}

GradientReducer::Instead GradientSums::instead() const {
  if (!dtype_.has_value()) return {};
  return [this](const ReducedParameter& parameter, const at::Tensor& gradient) {
    return with(parameter.name, gradient, parameter.tensor);
  };
}

at::Tensor GradientSums::with(const std::string& name, const at::Tensor& gradient,
                              const at::Tensor& leaf) const {
  const auto sum = sums_.find(name);
  if (sum == sums_.end()) return gradient;
  const at::NoGradGuard no_grad;
  const at::Tensor all = gradient.defined() ? sum->second + gradient : sum->second;
  return all.to(leaf.scalar_type());
}

NamedTensors GradientSums::of(const NamedTensors& leaves) const {
  if (!dtype_.has_value()) return gradients_of(leaves);
  NamedTensors all = sums_;
  for (const auto& [name, leaf] : leaves) {
    if (leaf.requires_grad() && !all.contains(name))
      all[name] = at::zeros_like(leaf, at::TensorOptions().dtype(scalar_type_of(*dtype_))).detach();
  }
  return all;
}

}  // namespace isoshard
