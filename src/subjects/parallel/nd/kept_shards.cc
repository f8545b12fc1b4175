// SPDX-License-Identifier: Apache-2.0
// One gathering and one reduction a step.
#include "subjects/parallel/nd/kept_shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <span>
#include <utility>

#include "core/comm/tensor.h"
#include "core/observe/layer_name.h"
#include "subjects/parallel/grad_average.h"

namespace isoshard {

void KeptShards::setup(DataParallelSetup setup) {
  const at::NoGradGuard no_grad;
  mesh_ = setup.mesh;
  if (setup.parameters.empty()) return;
  compute_ = setup.parameters.front().tensor.scalar_type();
  master_ = setup.master_dtype.has_value() ? scalar_type_of(*setup.master_dtype) : compute_;
  const auto rank = static_cast<std::size_t>(groups_.shards->rank());
  for (HeldParameter& parameter : setup.parameters) {
    Place place{
        std::move(parameter.layout), parameter.tensor.sizes().vec(), {}, parameter.param_class};
    place.shards = dim0_shards(place.shape, groups_.shards->size());
    const Range& rows = place.shards.rows[rank];
    const bool is_trained = parameter.tensor.requires_grad();
    (is_trained ? masters_ : frozen_)[parameter.name] =
        parameter.tensor.detach()
            .narrow(0, rows.begin, rows.count)
            .to(is_trained ? master_ : compute_, /*non_blocking=*/false, /*copy=*/true);
    parameter.tensor.reset();
    const std::string block(layer_of(parameter.name));
    blocks_[block].push_back(parameter.name);
    if (is_trained) trained_[block].push_back(parameter.name);
    places_[parameter.name] = std::move(place);
  }
}

const at::Tensor& KeptShards::shard_of(const std::string& name) const {
  const auto frozen = frozen_.find(name);
  return frozen == frozen_.end() ? masters_.at(name) : frozen->second;
}

const KeptShards::Place& KeptShards::place_of(std::string_view name) const {
  return places_.find(name)->second;
}

void KeptShards::clear_gradients() {
  sums_.clear();
  gradients_.clear();
}

const NamedTensors& KeptShards::before_forward() {
  if (whole_.empty()) {
    for (const auto& [module, names] : blocks_) gather(names);
  }
  return whole_;
}

std::vector<Segment> KeptShards::segments_of(const std::vector<std::string>& names) const {
  std::vector<Segment> segments;
  std::int64_t next = 0;
  for (int rank = 0; rank < groups_.shards->size(); ++rank) {
    for (const std::string& name : names) {
      const Place& place = place_of(name);
      segments.push_back({name, place.param_class, next, place.shards.padded});
      next += place.shards.padded;
    }
  }
  return segments;
}

// Each rank's block holds one padded segment a parameter.
void KeptShards::gather(const std::vector<std::string>& names) {
  const at::NoGradGuard no_grad;
  std::int64_t block = 0;
  for (const std::string& name : names) block += place_of(name).shards.padded;
  at::Tensor own = at::zeros({block}, shard_of(names.front()).options().dtype(compute_));
  std::int64_t next = 0;
  for (const std::string& name : names) {
    const at::Tensor& shard = shard_of(name);
    own.narrow(0, next, shard.numel()).copy_(shard.reshape({-1}));
    next += place_of(name).shards.padded;
  }
  const std::vector<Segment> segments = segments_of(names);
  const at::Tensor all =
      all_gather(*groups_.shards, own, {Purpose::kParamGather, Axis::kDp, segments})
          .view({groups_.shards->size(), block});
  next = 0;
  for (const std::string& name : names) {
    const Place& place = place_of(name);
    // padding is at the end only
    whole_[name] = all.narrow(1, next, place.shards.padded)
                       .flatten()
                       .narrow(0, 0, numel_of(place.shape))
                       .view(place.shape)
                       .clone()
                       .requires_grad_(masters_.contains(name));
    next += place.shards.padded;
  }
}

void KeptShards::after_backward(bool /*reduces*/, bool /*is_last*/) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = reduce_dtype_.has_value() ? scalar_type_of(*reduce_dtype_) : compute_;
  for (auto& [name, whole] : whole_) {
    if (!whole.grad().defined()) continue;
    const at::Tensor own = whole.grad().to(type);
    at::Tensor& sum = sums_[name];
    sum = sum.defined() ? sum + own : own;
    whole.mutable_grad().reset();
  }
}

void KeptShards::finish() {
  for (const auto& [module, names] : trained_) reduce(names);
  sums_.clear();
  whole_.clear();
}

void KeptShards::reduce(const std::vector<std::string>& names) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = reduce_dtype_.has_value() ? scalar_type_of(*reduce_dtype_) : compute_;
  const int ranks = groups_.shards->size();
  std::int64_t block = 0;
  for (const std::string& name : names) block += place_of(name).shards.padded;
  const at::Tensor blocks =
      at::zeros({ranks, block}, masters_.at(names.front()).options().dtype(type));
  std::int64_t next = 0;
  for (const std::string& name : names) {
    const Place& place = place_of(name);
    const auto sum = sums_.find(name);
    for (int rank = 0; sum != sums_.end() && rank < ranks; ++rank) {
      const Range& run = place.shards.elements[static_cast<std::size_t>(rank)];
      blocks.select(0, rank)
          .narrow(0, next, run.count)
          .copy_(sum->second.reshape({-1}).narrow(0, run.begin, run.count));
    }
    next += place.shards.padded;
  }
  const std::vector<Segment> segments = segments_of(names);
  const AveragedReduction average(average_, ranks);
  average.scale_before(blocks);
  at::Tensor own = reduce_scatter(*groups_.shards, blocks.view({-1}), average.reduction(),
                                  {Purpose::kGradReduce, Axis::kDp, segments});
  average.scale_after(own);
  if (groups_.replicas != nullptr) {
    all_reduce(*groups_.replicas, own, Reduction::kAvg,
               {Purpose::kGradReduce, Axis::kDpReplicate, std::span(segments).first(names.size())})
        .wait();
  }
  next = 0;
  for (const std::string& name : names) {
    const at::Tensor& shard = masters_.at(name);
    gradients_[name] = own.narrow(0, next, shard.numel()).view(shard.sizes()).to(master_).clone();
    next += place_of(name).shards.padded;
  }
}

const NamedTensors& KeptShards::held() const {
  if (compute_ == master_ && frozen_.empty()) return masters_;
  const at::NoGradGuard no_grad;
  if (held_.empty()) {
    held_ = frozen_;
    for (const auto& [name, master] : masters_) held_[name] = master.to(compute_);
  }
  return held_;
}

Layout KeptShards::held_layout(std::string_view name) const {
  const Place& place = place_of(name);
  if (!is_cut_over_dp()) return place.layout;
  const Range& run = place.shards.elements[static_cast<std::size_t>(groups_.shards->rank())];
  return layout_of_run(place.layout, place.shape, mesh_->shape(), mesh_->rank(), run.begin,
                       run.count);
}

Layout KeptShards::read_layout(std::string_view name) const {
  const Place& place = place_of(name);
  if (!is_cut_over_dp()) return place.layout;
  return layout_in_shards(place.layout, place.shape, mesh_->shape(), mesh_->rank(),
                          place.shards.elements);
}

}  // namespace isoshard
