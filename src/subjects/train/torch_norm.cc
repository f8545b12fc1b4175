// SPDX-License-Identifier: Apache-2.0
// Norms of norms.
#include "subjects/train/torch_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/comm/tensor.h"

namespace isoshard {

TorchGradNorm::TorchGradNorm(std::vector<ParameterSpec> specs, Communicator* dp)
    : specs_(std::move(specs)), dp_(dp) {
  for (const ParameterSpec& spec : specs_)
    segments_.push_back(
        {spec.name, spec.param_class, static_cast<std::int64_t>(segments_.size()), 1});
}

double TorchGradNorm::norm(const NamedTensors& gradients) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  for (const ParameterSpec& spec : specs_)
    own.push_back(at::linalg_vector_norm(gradients.at(spec.name), 2));
  at::Tensor norms = at::stack(own);
  if (dp_ != nullptr) {
    norms = norms.pow(2);
    all_reduce(*dp_, norms, Reduction::kSum, {Purpose::kClipNorm, Axis::kDp, segments_}).wait();
    norms = norms.pow(0.5);
  }
  norm_ = at::linalg_vector_norm(norms, 2);
  return norm_.item<double>();
}

// max_norm / (norm + 1e-6) is the reciprocal times max_norm, each rounded.
double TorchGradNorm::factor(double norm, double max_norm) {
  if (max_norm == 0) return 1;
  const at::Tensor own = norm_.new_full({}, norm);
  return own.add(1e-6).reciprocal().mul(max_norm).clamp_max(1).item<double>();
}

}  // namespace isoshard
