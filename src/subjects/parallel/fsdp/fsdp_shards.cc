// SPDX-License-Identifier: Apache-2.0
// Shards, and when they are gathered.
#include "subjects/parallel/fsdp/fsdp_shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "core/observe/layer_name.h"

namespace isoshard {

void FsdpShards::setup(DataParallelSetup setup) {
  const at::NoGradGuard no_grad;
  mesh_ = setup.mesh;
  if (groups_.shards == nullptr) groups_.shards = &mesh_->group(Axis::kDp);
  on_read_ = std::move(setup.on_read);
  compute_ = setup.parameters.front().tensor.scalar_type();
  master_ = setup.master_dtype.has_value() ? scalar_type_of(*setup.master_dtype) : compute_;
  FsdpDtypes dtypes{compute_, {}, average_};
  if (reduce_dtype_.has_value()) dtypes.reduce = scalar_type_of(*reduce_dtype_);
  const auto rank = static_cast<std::size_t>(groups_.shards->rank());

  std::map<std::string, std::vector<FsdpShard>, std::less<>> groups;
  for (HeldParameter& parameter : setup.parameters) {
    FsdpShard shard{parameter.name, parameter.param_class, parameter.tensor.sizes().vec(), {}, {}};
    shard.shards = dim0_shards(shard.whole, groups_.shards->size());
    const Range& rows = shard.shards.rows[rank];
    const at::Tensor own = parameter.tensor.detach().narrow(0, rows.begin, rows.count);
    const bool is_trained = parameter.tensor.requires_grad();
    shard.tensor = own.to(is_trained ? master_ : compute_, /*non_blocking=*/false, /*copy=*/true)
                       .requires_grad_(is_trained);
    parameter.tensor.reset();
    (is_trained ? masters_ : frozen_)[parameter.name] = shard.tensor;
    places_[parameter.name] = {std::move(parameter.layout), shard.whole, shard.shards.elements};
    groups[std::string(layer_of(parameter.name))].push_back(std::move(shard));
  }
  for (auto& [module, shards] : groups) {
    blocks_[module].group =
        std::make_unique<FsdpGroup>(std::move(shards), groups_, dtypes, gathered_bytes_);
  }
}

void FsdpShards::clear_gradients() {
  for (auto& [name, shard] : masters_) shard.mutable_grad().reset();
}

const NamedTensors& FsdpShards::before_forward() {
  held_.clear();
  whole_.clear();
  for (auto& [module, block] : blocks_) block.group->forget_passes();
  if (const auto root = blocks_.find(""); root != blocks_.end())
    root->second.open_pass = root->second.group->gather(whole_);
  return whole_;
}

FsdpShards::Block& FsdpShards::block(std::string_view module) {
  const auto found = blocks_.find(module);
  if (module.empty() || found == blocks_.end()) {
    throw UsageError(
        fmt::format("the model enters the block '{}', which has no parameters of its own", module));
  }
  return found->second;
}

void FsdpShards::enter_block(std::string_view module) {
  Block& own = block(module);
  own.open_pass = own.group->gather(whole_);
  if (!on_read_ || is_in_backward_) return;
  for (const FsdpShard& shard : own.group->shards()) on_read_(shard.name, whole_.at(shard.name));
}

// While backward computes a layer again its parameters stay: backward goes through them next.
at::Tensor FsdpShards::leave_block(std::string_view module, at::Tensor output) {
  Block& own = block(module);
  for (const FsdpShard& shard : own.group->shards()) whole_[shard.name].reset();
  if (is_in_backward_) return output;
  own.group->release(own.open_pass);
  if (output.requires_grad()) {
    output.register_hook([group = own.group.get(), pass = own.open_pass](
                             const at::Tensor& /*gradient*/) { group->regather(pass); });
  }
  return output;
}

void FsdpShards::before_backward(bool /*reduces*/) {
  is_in_backward_ = true;
}

void FsdpShards::after_backward(bool /*reduces*/, bool /*is_last*/) {
  is_in_backward_ = false;
  whole_.clear();
}

const NamedTensors& FsdpShards::held() const {
  if (compute_ == master_ && frozen_.empty()) return masters_;
  const at::NoGradGuard no_grad;
  if (held_.empty()) {
    held_ = frozen_;
    for (const auto& [name, master] : masters_) held_[name] = master.detach().to(compute_);
  }
  return held_;
}

Layout FsdpShards::held_layout(std::string_view name) const {
  const Place& place = places_.find(name)->second;
  if (!is_cut_over_dp()) return place.layout;
  return layout_of_shard(place, place.runs.at(static_cast<std::size_t>(groups_.shards->rank())));
}

Layout FsdpShards::layout_of_shard(const Place& place, const Range& run) const {
  return layout_of_run(place.layout, place.shape, mesh_->shape(), mesh_->rank(), run.begin,
                       run.count);
}

Layout FsdpShards::read_layout(std::string_view name) const {
  const Place& place = places_.find(name)->second;
  if (!is_cut_over_dp()) return place.layout;
  return layout_in_shards(place.layout, place.shape, mesh_->shape(), mesh_->rank(), place.runs);
}

NamedTensors FsdpShards::gradients() {
  return gradients_of(masters_);
}

}  // namespace isoshard
