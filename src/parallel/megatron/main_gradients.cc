// SPDX-License-Identifier: Apache-2.0
// Buckets of main gradients and of parameters.
#include "parallel/megatron/main_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "comm/tensor.h"

namespace isoshard {

at::Tensor MainGradients::Bucket::part(const at::Tensor& flat, int dp, int dp_rank) const {
  const std::int64_t count = flat.numel() / dp;
  return flat.narrow(0, dp_rank * count, count);
}

void MainGradients::setup(DataParallelSetup setup) {
  const at::NoGradGuard no_grad;
  mesh_ = setup.mesh;
  dp_ = mesh_->degree(Axis::kDp);
  dp_rank_ = mesh_->coordinate(Axis::kDp);
  const at::Tensor& first = setup.parameters.front().tensor;
  const Dtype gradients = main_gradient_dtype(dtype_of(first));
  gradient_type_ = scalar_type_of(gradients);
  master_type_ = setup.master_dtype.has_value() ? scalar_type_of(*setup.master_dtype) : first.scalar_type();
  has_masters_ = steps_ == Steps::kDistributed || setup.master_dtype.has_value();

  std::vector<std::int64_t> numels;
  for (const HeldParameter& parameter : setup.parameters) numels.push_back(parameter.tensor.numel());
  const std::int64_t bucket_numel = std::max<std::int64_t>(1, setup.bucket_bytes / static_cast<std::int64_t>(size_of(gradients)));
  for (const BufferBucket& bucket : buffer_buckets(numels, bucket_numel, dp_, steps_ == Steps::kDistributed)) {
    add_bucket(bucket, setup.parameters);
  }
}

void MainGradients::add_bucket(const BufferBucket& layout, std::vector<HeldParameter>& parameters) {
  Bucket bucket;
  const at::TensorOptions options = parameters.front().tensor.options().requires_grad(false);
  bucket.gradients = at::zeros({layout.numel}, options.dtype(gradient_type_));
  if (steps_ == Steps::kDistributed) bucket.parameters = at::zeros({layout.numel}, options);
  for (std::size_t i = 0; i < layout.parameters.size(); ++i) {
    HeldParameter& parameter = parameters[layout.parameters[i]];
    const std::int64_t begin = layout.begins[i], numel = parameter.tensor.numel();
    Place place{std::move(parameter.layout), parameter.tensor.sizes().vec(), buckets_.size(), begin, {0, numel}};
    if (is_cut_over_dp()) place.run = owned_run(layout, begin, numel, dp_, dp_rank_);
    if (steps_ == Steps::kDistributed) {
      const at::Tensor view = bucket.parameters.narrow(0, begin, numel).view(place.shape);
      view.copy_(parameter.tensor);
      parameter.tensor.set_data(view);
    }
    if (has_masters_) {
      masters_[parameter.name] = piece_of(parameter.tensor.detach(), place).to(master_type_, /*non_blocking=*/false, /*copy=*/true);
    }
    held_[parameter.name] = parameter.tensor;
    bucket.segments.push_back({parameter.name, parameter.param_class, begin, numel});
    places_[parameter.name] = std::move(place);
  }
  buckets_.push_back(std::move(bucket));
}

at::Tensor MainGradients::piece_of(const at::Tensor& whole, const Place& place) const {
  return place.run.count == whole.numel() ? whole : whole.reshape({-1}).narrow(0, place.run.begin, place.run.count);
}

at::Tensor MainGradients::main_gradient(const Place& place) const {
  return buckets_[place.bucket].gradients.narrow(0, place.begin, numel_of(place.shape)).view(place.shape);
}

void MainGradients::clear_gradients() {
  for (auto& [name, parameter] : held_) parameter.mutable_grad().reset();
  for (Bucket& bucket : buckets_) bucket.gradients.zero_();
}

void MainGradients::after_backward(bool reduces, bool /*is_last*/) {
  const at::NoGradGuard no_grad;
  for (auto& [name, parameter] : held_) {
    if (!parameter.grad().defined()) continue;
    main_gradient(places_.find(name)->second).add_(parameter.grad());
    parameter.mutable_grad().reset();
  }
  if (reduces) reduce();
}

void MainGradients::reduce() {
  Communicator& group = mesh_->group(Axis::kDp);
  for (const Bucket& bucket : buckets_) {
    const CallInfo info{Purpose::kGradReduce, Axis::kDp, bucket.segments};
    if (steps_ == Steps::kDistributed) {
      bucket.part(bucket.gradients, dp_, dp_rank_).copy_(reduce_scatter(group, bucket.gradients, Reduction::kAvg, info));
    } else {
      all_reduce(group, bucket.gradients, Reduction::kAvg, info).wait();
    }
  }
}

NamedTensors MainGradients::gradients() {
  const at::NoGradGuard no_grad;
  NamedTensors gradients;
  for (const auto& [name, place] : places_) gradients[name] = piece_of(main_gradient(place), place).to(master_type_);
  return gradients;
}

Layout MainGradients::piece_layout(std::string_view name) const {
  const Place& place = places_.find(name)->second;
  if (!is_cut_over_dp()) return place.layout;
  return layout_of_run(place.layout, place.shape, mesh_->shape(), mesh_->rank(), place.run.begin, place.run.count);
}

void MainGradients::publish() {
  if (!has_masters_) return;
  const at::NoGradGuard no_grad;
  for (const auto& [name, master] : masters_) {
    if (master.numel() > 0) piece_of(held_.at(name).detach(), places_.at(name)).copy_(master);
  }
  if (steps_ != Steps::kDistributed) return;
  for (const Bucket& bucket : buckets_) {
    const at::Tensor own = bucket.part(bucket.parameters, dp_, dp_rank_).clone();
    bucket.parameters.copy_(all_gather(mesh_->group(Axis::kDp), own, {Purpose::kParamGather, Axis::kDp, bucket.segments}));
  }
}

}  // namespace isoshard
