// SPDX-License-Identifier: Apache-2.0
// Replicas: hold, reduce, step all.
#include "subjects/parallel/ddp/replicas.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/comm/tensor.h"

namespace isoshard {

void Replicas::setup(DataParallelSetup setup) {
  const at::NoGradGuard no_grad;
  master_dtype_ = setup.master_dtype;
  std::vector<ReducedParameter> reduced;
  for (HeldParameter& parameter : setup.parameters) {
    if (master_dtype_.has_value()) {
      masters_[parameter.name] = parameter.tensor.detach().to(
          scalar_type_of(*master_dtype_), /*non_blocking=*/false, /*copy=*/true);
    }
    layouts_[parameter.name] = std::move(parameter.layout);
    held_[parameter.name] = parameter.tensor;
    reduced.push_back({parameter.name, parameter.param_class, parameter.tensor});
  }
  if (reduces_ == Reduces::kNever) return;
  const auto buckets = reduces_ == Reduces::kOverDpInRebuiltBuckets
                           ? GradientReducer::Buckets::kRebuiltOnce
                           : GradientReducer::Buckets::kFixed;
  reducer_ =
      std::make_unique<GradientReducer>(std::move(reduced), setup.mesh->group(Axis::kDp),
                                        setup.bucket_bytes, buckets, average_, sums_.instead());
}

void Replicas::clear_gradients() {
  sums_.clear();
  for (auto& [name, parameter] : held_) parameter.mutable_grad().reset();
}

void Replicas::before_backward(bool reduces) {
  is_reducing_ = reducer_ != nullptr && reduces;
  if (is_reducing_) reducer_->arm();
}

void Replicas::after_backward(bool /*reduces*/, bool is_last) {
  if (!is_reducing_) sums_.take(held_);
  if (!is_reducing_ || is_last) return;
  reducer_->finish();
  is_reducing_ = false;
}

void Replicas::finish() {
  if (is_reducing_) reducer_->finish();
  is_reducing_ = false;
}

NamedTensors Replicas::gradients() {
  const at::NoGradGuard no_grad;
  NamedTensors gradients = gradients_of(held_);
  if (!master_dtype_.has_value()) return gradients;
  for (auto& [name, gradient] : gradients) gradient = gradient.to(scalar_type_of(*master_dtype_));
  return gradients;
}

void Replicas::publish() {
  if (!master_dtype_.has_value()) return;
  const at::NoGradGuard no_grad;
  for (const auto& [name, master] : masters_) held_.at(name).copy_(master);
}

}  // namespace isoshard
