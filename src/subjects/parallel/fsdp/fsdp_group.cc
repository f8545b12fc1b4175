// SPDX-License-Identifier: Apache-2.0
// Gathering into memory that comes and goes, and the autograd node that reduces.
#include "subjects/parallel/fsdp/fsdp_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/comm/tensor.h"
#include "core/tensor/device.h"
#include "subjects/parallel/grad_average.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An autograd context keeps integers, so the group travels as its address.
FsdpGroup& group_of(std::int64_t address) {
  return *reinterpret_cast<FsdpGroup*>(static_cast<std::intptr_t>(address));
}

// Shards in, whole parameters out; backward runs when all their gradients are there.
class GatheredParameters final : public torch::autograd::Function<GatheredParameters> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList /*shards*/,
                               std::int64_t group, FsdpGroup::Pass pass) {
    context->saved_data["group"] = group;
    context->saved_data["pass"] = pass;
    variable_list whole = group_of(group).whole_parameters(pass);
    variable_list frozen;
    const std::vector<FsdpShard>& shards = group_of(group).shards();
    for (std::size_t i = 0; i < whole.size(); ++i) {
      if (!shards[i].tensor.requires_grad()) frozen.push_back(whole[i]);
    }
    context->mark_non_differentiable(frozen);
    return whole;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list result = group_of(context->saved_data["group"].toInt())
                               .shard_gradients(context->saved_data["pass"].toInt(), gradients);
    result.resize(result.size() + 2);  // none of the group and of the pass
    return result;
  }
};

// All of a storage from another angle; no view in autograd's sense.
at::Tensor over(const c10::Storage& storage, at::ScalarType dtype, const Shape& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()));
  tensor.set_(storage, 0, shape, strides);
  return tensor;
}

}  // namespace

FsdpGroup::FsdpGroup(std::vector<FsdpShard> shards, const ShardGroups& groups, FsdpDtypes dtypes,
                     GatheredBytes& bytes)
    : shards_(std::move(shards)),
      dp_(groups.shards),
      replicas_(groups.replicas),
      dtypes_(dtypes),
      bytes_(&bytes) {
  gathered_ = blocks_of(/*of_trained_only=*/false);
  reduced_ = blocks_of(/*of_trained_only=*/true);
}

FsdpGroup::Blocks FsdpGroup::blocks_of(bool of_trained_only) const {
  Blocks blocks;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (of_trained_only && !shards_[i].tensor.requires_grad()) continue;
    blocks.shards.push_back(i);
    blocks.offsets.push_back(blocks.numel);
    blocks.numel += shards_[i].shards.padded;
  }
  for (std::int64_t rank = 0; rank < dp_->size(); ++rank) {
    for (std::size_t k = 0; k < blocks.shards.size(); ++k) {
      const FsdpShard& shard = shards_[blocks.shards[k]];
      blocks.segments.push_back({shard.name, shard.param_class,
                                 rank * blocks.numel + blocks.offsets[k], shard.shards.padded});
    }
  }
  return blocks;
}

FsdpGroup::Pass FsdpGroup::gather(NamedTensors& parameters) {
  const Pass pass = next_pass_++;
  std::vector<at::Tensor> leaves;
  for (const FsdpShard& shard : shards_) leaves.push_back(shard.tensor);
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(this));
  const variable_list whole = GatheredParameters::apply(at::TensorList(leaves), address, pass);
  for (std::size_t i = 0; i < shards_.size(); ++i) parameters[shards_[i].name] = whole[i];
  return pass;
}

at::TensorOptions FsdpGroup::in(at::ScalarType dtype) const {
  return at::TensorOptions().dtype(dtype).device(shards_.front().tensor.device());
}

std::int64_t FsdpGroup::padded_bytes(const FsdpShard& shard) const {
  return shard.shards.padded * dp_->size() *
         static_cast<std::int64_t>(c10::elementSize(dtypes_.compute));
}

std::vector<at::Tensor> FsdpGroup::whole_parameters(Pass pass) {
  std::vector<c10::Storage>& storages = passes_[pass];
  std::vector<at::Tensor> whole;
  for (const FsdpShard& shard : shards_) {
    const at::Tensor padded = at::empty({shard.shards.padded * dp_->size()}, in(dtypes_.compute));
    storages.push_back(padded.storage());
    whole.push_back(over(padded.storage(), dtypes_.compute, shard.whole));
  }
  fill(storages);
  return whole;
}

void FsdpGroup::regather(Pass pass) {
  const at::NoGradGuard no_grad;
  const std::vector<c10::Storage>& storages = passes_.at(pass);
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    resize_storage(storages[i], static_cast<std::size_t>(padded_bytes(shards_[i])));
  }
  fill(storages);
}

// Shards are rounded before they travel. Those of one parameter follow each other without a gap, so
// that what pads is at the end only.
void FsdpGroup::fill(const std::vector<c10::Storage>& storages) {
  at::Tensor own = at::zeros({gathered_.numel}, in(dtypes_.compute));
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const at::Tensor& shard = shards_[i].tensor;
    own.narrow(0, gathered_.offsets[i], shard.numel()).copy_(shard.detach().view({-1}));
  }
  const std::int64_t ranks = dp_->size();
  const at::Tensor all =
      all_gather(*dp_, own, {Purpose::kParamGather, Axis::kDp, gathered_.segments})
          .view({ranks, gathered_.numel});
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const std::int64_t padded = shards_[i].shards.padded;
    over(storages[i], dtypes_.compute, {ranks, padded})
        .copy_(all.narrow(1, gathered_.offsets[i], padded));
    bytes_->now += padded_bytes(shards_[i]);
  }
  bytes_->peak = std::max(bytes_->peak, bytes_->now);
}

void FsdpGroup::release(Pass pass) {
  const auto found = passes_.find(pass);
  if (found == passes_.end()) return;
  for (const c10::Storage& storage : found->second) {
    bytes_->now -= static_cast<std::int64_t>(storage.nbytes());
    resize_storage(storage, 0);
  }
}

void FsdpGroup::forget_passes() {
  for (const auto& [pass, storages] : passes_) release(pass);
  passes_.clear();
}

std::vector<at::Tensor> FsdpGroup::shard_gradients(Pass pass,
                                                   const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  release(pass);
  passes_.erase(pass);
  const std::int64_t ranks = dp_->size();
  // A group of one adds nothing and rounds nothing.
  const at::ScalarType reduced_in = ranks == 1 && replicas_ == nullptr
                                        ? dtypes_.compute
                                        : dtypes_.reduce.value_or(dtypes_.compute);
  const at::Tensor blocks = at::zeros({ranks, reduced_.numel}, in(reduced_in));
  for (std::size_t k = 0; k < reduced_.shards.size(); ++k) {
    const std::size_t i = reduced_.shards[k];
    if (!gradients[i].defined()) continue;
    const at::Tensor flat = gradients[i].reshape({-1});
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const Range& run = shards_[i].shards.elements[static_cast<std::size_t>(rank)];
      blocks.select(0, rank)
          .narrow(0, reduced_.offsets[k], run.count)
          .copy_(flat.narrow(0, run.begin, run.count));
    }
  }
  const AveragedReduction average(dtypes_.average, dp_->size());
  average.scale_before(blocks);
  at::Tensor own = reduce_scatter(*dp_, blocks.view({-1}), average.reduction(),
                                  {Purpose::kGradReduce, Axis::kDp, reduced_.segments});
  average.scale_after(own);
  if (replicas_ != nullptr) {
    all_reduce(*replicas_, own, Reduction::kAvg,
               {Purpose::kGradReduce, Axis::kDpReplicate,
                std::span(reduced_.segments).first(reduced_.shards.size())})
        .wait();
  }
  std::vector<at::Tensor> result(shards_.size());
  for (std::size_t k = 0; k < reduced_.shards.size(); ++k) {
    const at::Tensor& shard = shards_[reduced_.shards[k]].tensor;
    result[reduced_.shards[k]] = own.narrow(0, reduced_.offsets[k], shard.numel())
                                     .view(shard.sizes())
                                     .to(shard.scalar_type());
  }
  return result;
}

}  // namespace isoshard
