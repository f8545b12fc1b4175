// SPDX-License-Identifier: Apache-2.0
// Tokens of cp in the layers of tp.
#include "subjects/parallel/nd/nd_strategy.h"

#include <ATen/ATen.h>

#include <utility>

#include "core/base/error.h"
#include "subjects/model/ops/autocast.h"
#include "subjects/parallel/nd/context_attention.h"

namespace isoshard {

NdStrategy::NdStrategy(ShardPlan plan, Mesh& mesh, std::shared_ptr<const NdGroups> groups,
                       const TrainSettings& settings, FsdpShards* shards)
    : TensorParallelStrategy(std::move(plan), mesh.group(Axis::kTp), mesh.degree(Axis::kDp),
                             mesh.degree(Axis::kDp) * mesh.degree(Axis::kCp),
                             settings.record_partials, mesh.coordinate(Axis::kDp),
                             sequence_split(settings)),
      mesh_(&mesh),
      groups_(std::move(groups)),
      settings_(settings.nd),
      context_(settings_.context_order, mesh.degree(Axis::kCp), mesh.coordinate(Axis::kCp)),
      shards_(shards) {}

at::Tensor NdStrategy::attention(std::string_view module, const at::Tensor& q_BNSD,
                                 const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                                 AttentionImpl impl, SoftmaxDtype softmax,
                                 const AttentionDropout& dropout) const {
  if (context_.degree() == 1) {
    return TensorParallelStrategy::attention(module, q_BNSD, k_BKSD, v_BKSD, impl, softmax,
                                             dropout);
  }
  // before they travel, as torch's own dispatch rounds them before its context_parallel sees them
  const at::Tensor q = as_product_input(q_BNSD), own_k = as_product_input(k_BKSD),
                   own_v = as_product_input(v_BKSD);
  if (settings_.context_attention == ContextAttention::kRing) {
    if (dropout) {
      throw UsageError(
          "attention dropout is not available with ring attention; use --context-attention "
          "all-gather");
    }
    return ring_attention(q, {own_k, own_v}, context_, groups_->context(),
                          settings_.ring_merge_dtype, module);
  }
  const auto [k, v] = whole_context(module, own_k, own_v);
  return causal_attention(q, k, v, impl, softmax, dropout, token_positions(q_BNSD.size(2)));
}

KeysValues NdStrategy::whole_context(std::string_view module, const at::Tensor& k_BKSD,
                                     const at::Tensor& v_BKSD) const {
  if (context_.degree() == 1) return {k_BKSD, v_BKSD};
  return gathered_context({k_BKSD, v_BKSD}, context_, groups_->context(), module);
}

at::Tensor NdStrategy::token_positions(std::int64_t length) const {
  return context_.degree() == 1 ? at::Tensor() : context_.positions(sequence_length(length));
}

std::int64_t NdStrategy::sequence_length(std::int64_t length) const {
  return length * context_.degree();
}

Layout NdStrategy::over_context(Layout layout, const at::Tensor& /*local*/,
                                int sequence_dim) const {
  layout = context_.over_tokens(std::move(layout), sequence_dim, mesh_->shape(), mesh_->rank());
  if (mesh_->degree(Axis::kPp) > 1)
    layout.placements.push_back(only_at(Axis::kPp, mesh_->coordinate(Axis::kPp)));
  return layout;
}

void NdStrategy::enter_block(std::string_view module) const {
  if (shards_ != nullptr) shards_->enter_block(module);
}

at::Tensor NdStrategy::leave_block(std::string_view module, at::Tensor output) const {
  return shards_ == nullptr ? output : shards_->leave_block(module, std::move(output));
}

}  // namespace isoshard
