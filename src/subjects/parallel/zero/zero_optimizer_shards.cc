// SPDX-License-Identifier: Apache-2.0
// Flat partitions of masters and optimizer state.
#include "subjects/parallel/zero/zero_optimizer_shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"

namespace isoshard {

ZeroOptimizerShards::ZeroOptimizerShards(int stage, GradAverage average,
                                         std::optional<Dtype> accumulate_dtype)
    : stage_(stage),
      average_(average),
      accumulate_dtype_(accumulate_dtype),
      sums_(accumulate_dtype) {
  if (stage != 1 && stage != 2)
    throw UsageError(
        fmt::format("the ZeRO stage must be 1 or 2 to partition optimizer state, got {}", stage));
}

void ZeroOptimizerShards::setup(DataParallelSetup setup) {
  const at::NoGradGuard no_grad;
  mesh_ = setup.mesh;
  std::vector<std::int64_t> numels;
  for (const HeldParameter& parameter : setup.parameters)
    numels.push_back(parameter.tensor.numel());
  partition_ = zero_partition(numels, mesh_->degree(Axis::kDp));
  const at::TensorOptions options = setup.parameters.front().tensor.options().requires_grad(false);
  flat_ = at::zeros({partition_.padded_numel()}, options);
  master_type_ =
      setup.master_dtype.has_value() ? scalar_type_of(*setup.master_dtype) : flat_.scalar_type();

  std::vector<ReducedParameter> reduced;
  for (std::size_t i = 0; i < setup.parameters.size(); ++i) {
    HeldParameter& parameter = setup.parameters[i];
    const Place place{std::move(parameter.layout), parameter.tensor.sizes().vec(), i};
    at::Tensor view = flat_.narrow(0, partition_.offsets[i], numels[i]).view(place.shape);
    view.copy_(parameter.tensor);
    parameter.tensor.set_data(view);
    held_[parameter.name] = parameter.tensor;
    segments_.push_back({parameter.name, parameter.param_class, partition_.offsets[i], numels[i]});
    masters_[parameter.name] = piece_of(parameter.tensor.detach(), place)
                                   .to(master_type_, /*non_blocking=*/false, /*copy=*/true);
    places_[parameter.name] = place;
    reduced.push_back({parameter.name, parameter.param_class, parameter.tensor});
  }
  Communicator& dp = mesh_->group(Axis::kDp);
  if (stage_ == 1) {
    reducer_ = std::make_unique<GradientReducer>(std::move(reduced), dp, setup.bucket_bytes,
                                                 GradientReducer::Buckets::kFixed, average_,
                                                 sums_.instead());
  } else {
    owner_reducer_ = std::make_unique<OwnerReducer>(
        std::move(reduced), partition_, dp, setup.bucket_bytes, average_, accumulate_dtype_);
  }
}

const Range& ZeroOptimizerShards::own_run(const Place& place) const {
  return partition_.runs.at(place.index).at(static_cast<std::size_t>(mesh_->coordinate(Axis::kDp)));
}

at::Tensor ZeroOptimizerShards::piece_of(const at::Tensor& whole, const Place& place) const {
  const Range& run = own_run(place);
  return run.count == whole.numel() ? whole : whole.reshape({-1}).narrow(0, run.begin, run.count);
}

void ZeroOptimizerShards::clear_gradients() {
  for (auto& [name, parameter] : held_) parameter.mutable_grad().reset();
  sums_.clear();
  if (owner_reducer_ != nullptr) owner_reducer_->clear();
}

void ZeroOptimizerShards::before_backward(bool reduces) {
  if (owner_reducer_ != nullptr) {
    owner_reducer_->arm();
    return;
  }
  is_reducing_ = reduces;
  if (is_reducing_) reducer_->arm();
}

void ZeroOptimizerShards::after_backward(bool /*reduces*/, bool is_last) {
  if (owner_reducer_ != nullptr) {
    owner_reducer_->finish();
  } else if (!is_reducing_) {
    sums_.take(held_);
  }
  if (!is_reducing_ || is_last) return;
  reducer_->finish();
  is_reducing_ = false;
}

void ZeroOptimizerShards::finish() {
  if (is_reducing_) reducer_->finish();
  is_reducing_ = false;
}

AccumulatedGradients ZeroOptimizerShards::accumulated() const {
  if (owner_reducer_ == nullptr) return {sums_.of(held_)};
  AccumulatedGradients pieces{{}, /*is_reduced=*/true};
  for (const auto& [name, master] : masters_)
    pieces.gradients[name] = owner_reducer_->pieces().at(name).view(master.sizes());
  return pieces;
}

NamedTensors ZeroOptimizerShards::gradients() {
  const at::NoGradGuard no_grad;
  NamedTensors gradients;
  for (const auto& [name, master] : masters_) {
    if (owner_reducer_ != nullptr) {
      gradients[name] = owner_reducer_->pieces().at(name).view(master.sizes()).to(master_type_);
      continue;
    }
    const at::Tensor& whole = held_.at(name).grad();
    gradients[name] = whole.defined() ? piece_of(whole, places_.at(name)).to(master_type_)
                                      : at::zeros_like(master);
  }
  return gradients;
}

Layout ZeroOptimizerShards::piece_layout(std::string_view name) const {
  const Place& place = places_.find(name)->second;
  if (!is_cut_over_dp()) return place.layout;
  const Range& run = own_run(place);
  return layout_of_run(place.layout, place.shape, mesh_->shape(), mesh_->rank(), run.begin,
                       run.count);
}

void ZeroOptimizerShards::publish() {
  const at::NoGradGuard no_grad;
  const std::int64_t begin = partition_.part_numel * mesh_->coordinate(Axis::kDp);
  const at::Tensor own = flat_.narrow(0, begin, partition_.part_numel).clone();
  for (const auto& [name, master] : masters_) {
    const Place& place = places_.at(name);
    if (master.numel() == 0) continue;
    const std::int64_t first = partition_.offsets[place.index] + own_run(place).begin - begin;
    own.narrow(0, first, master.numel()).copy_(master.reshape({-1}));
  }
  flat_.copy_(
      all_gather(mesh_->group(Axis::kDp), own, {Purpose::kParamGather, Axis::kDp, segments_}));
}

}  // namespace isoshard
