// SPDX-License-Identifier: Apache-2.0
/// Column- and row-parallel layers whose parameters are gathered over dp, layer by layer.
#pragma once
#include "subjects/parallel/fsdp/fsdp_shards.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"

namespace isoshard {

/// A TensorParallelStrategy that reports to FsdpShards which layer runs. `shards` must outlive it.
class FsdpStrategy final : public TensorParallelStrategy {
 public:
  FsdpStrategy(ShardPlan plan, Communicator& tp, int dp_degree, double activation_grad_scale,
               bool record_partials, int dp_rank, FsdpShards& shards);
  void enter_block(std::string_view module) const override;
  [[nodiscard]] at::Tensor leave_block(std::string_view module, at::Tensor output) const override;

 private:
  FsdpShards* shards_;
};

}  // namespace isoshard
