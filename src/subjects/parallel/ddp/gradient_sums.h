// SPDX-License-Identifier: Apache-2.0
/// Gradients of micro-batches that are added up beside the parameters, in a dtype of their own.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/base/dtype.h"
#include "subjects/optim/optimizer.h"
#include "subjects/parallel/ddp/gradient_reducer.h"

namespace isoshard {

/// Without a dtype autograd adds gradients up in the parameters, and nothing happens here.
/// Ranks    local.
/// Source   DeepSpeed 0.19.8, data_types.grad_accum_dtype: _update_hp_grad
///          (runtime/bf16_optimizer.py), _fill_param_grad_accum_attribute
///          (runtime/zero/stage_1_and_2.py).
class GradientSums {
 public:
  explicit GradientSums(std::optional<Dtype> dtype) : dtype_(dtype) {}
  void clear() { sums_.clear(); }
  /// Adds the gradients of `leaves`, and takes them away there.
  void take(const NamedTensors& leaves);
  /// What is reduced: the sum and the gradient, rounded to the dtype of the leaf. Empty without a
  /// dtype. It reads these sums, which must outlive it.
  [[nodiscard]] GradientReducer::Instead instead() const;
  /// What has been added up of each leaf, zeros where nothing has; without a dtype the leaves'
  /// gradients.
  [[nodiscard]] NamedTensors of(const NamedTensors& leaves) const;

 private:
  /// The sum and `gradient`, rounded to the dtype of `leaf`; either may be missing.
  [[nodiscard]] at::Tensor with(const std::string& name, const at::Tensor& gradient,
                                const at::Tensor& leaf) const;

  std::optional<Dtype> dtype_;
  NamedTensors sums_;
};

}  // namespace isoshard
