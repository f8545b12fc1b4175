// SPDX-License-Identifier: Apache-2.0
/// Tensor parallelism of tokens that are split over cp, in a stage of a pipeline.
#pragma once
#include <memory>
#include <string_view>

#include "subjects/parallel/fsdp/fsdp_shards.h"
#include "subjects/parallel/nd/context_split.h"
#include "subjects/parallel/nd/nd_groups.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "subjects/parallel/token_split.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// A TensorParallelStrategy whose forward reads its part of the tokens. Activations are recorded
/// with the places of these tokens, and as those of this rank's place on pp.
class NdStrategy final : public TensorParallelStrategy {
 public:
  /// `shards`: who gathers layers when forward comes to them; nullptr: nobody.
  NdStrategy(ShardPlan plan, Mesh& mesh, std::shared_ptr<const NdGroups> groups,
             const TrainSettings& settings, FsdpShards* shards);
  [[nodiscard]] at::Tensor attention(std::string_view module, const at::Tensor& q_BNSD,
                                     const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                                     AttentionImpl impl, SoftmaxDtype softmax,
                                     const AttentionDropout& dropout) const override;
  [[nodiscard]] KeysValues whole_context(std::string_view module, const at::Tensor& k_BKSD,
                                         const at::Tensor& v_BKSD) const override;
  [[nodiscard]] at::Tensor token_positions(std::int64_t length) const override;
  [[nodiscard]] std::int64_t sequence_length(std::int64_t length) const override;
  [[nodiscard]] Layout over_context(Layout layout, const at::Tensor& local,
                                    int sequence_dim) const override;
  void enter_block(std::string_view module) const override;
  [[nodiscard]] at::Tensor leave_block(std::string_view module, at::Tensor output) const override;

 private:
  Mesh* mesh_;
  std::shared_ptr<const NdGroups> groups_;
  NdSettings settings_;
  ContextSplit context_;
  FsdpShards* shards_;
};

/// Tokens by ContextSplit, shared over cp.
class NdTokenSplit final : public TokenSplit {
 public:
  NdTokenSplit(ContextSplit context, std::shared_ptr<const NdGroups> groups)
      : context_(context), groups_(std::move(groups)) {}
  [[nodiscard]] int degree() const noexcept override { return context_.degree(); }
  [[nodiscard]] at::Tensor own_tokens(const at::Tensor& whole_BS) const override {
    return context_.own_part(whole_BS, 1);
  }
  [[nodiscard]] Communicator& sharers() const noexcept override { return groups_->context(); }

 private:
  ContextSplit context_;
  std::shared_ptr<const NdGroups> groups_;
};

}  // namespace isoshard
