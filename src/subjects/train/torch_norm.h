// SPDX-License-Identifier: Apache-2.0
/// The gradient norm as torch makes it: in the dtype of the gradients.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "subjects/train/grad_norm.h"

namespace isoshard {

/// The norm of every parameter's gradient is rounded to its dtype, and so is what is made of these
/// norms: where gradients are cut over `dp`, the root of the sum of the squares of the pieces'
/// norms; then the norm of all parameters' norms. So the result depends on how gradients are
/// grouped into parameters and pieces. The factor is rounded to that dtype as well, twice.
///
/// Requires     gradients of one dtype, of parameters that are whole over tp.
/// Ranks        collective over `dp`, if given (clip_norm: one number a parameter, in the dtype of
///              the gradients).
/// Source       torch.nn.utils.clip_grad_norm_: _get_total_norm, _clip_grads_with_norm_
///              (torch/nn/utils/clip_grad.py); of DTensors also _NormPartial._reduce_value
///              (torch/distributed/tensor/_ops/_math_ops.py).
class TorchGradNorm final : public GradNorm {
 public:
  explicit TorchGradNorm(std::vector<ParameterSpec> specs, Communicator* dp = nullptr);
  [[nodiscard]] double norm(const NamedTensors& gradients) override;
  [[nodiscard]] double factor(double norm, double max_norm) override;

 private:
  std::vector<ParameterSpec> specs_;
  std::vector<Segment> segments_;
  Communicator* dp_;
  at::Tensor norm_;  ///< the last one, in its dtype
};

}  // namespace isoshard
