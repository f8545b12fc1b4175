// SPDX-License-Identifier: Apache-2.0
// Passing layers on.
#include "subjects/parallel/fsdp/fsdp_strategy.h"

#include <utility>

namespace isoshard {

FsdpStrategy::FsdpStrategy(ShardPlan plan, Communicator& tp, int dp_degree,
                           double activation_grad_scale, bool record_partials, int dp_rank,
                           FsdpShards& shards)
    : TensorParallelStrategy(std::move(plan), tp, dp_degree, activation_grad_scale, record_partials,
                             dp_rank),
      shards_(&shards) {}

void FsdpStrategy::enter_block(std::string_view module) const {
  shards_->enter_block(module);
}

at::Tensor FsdpStrategy::leave_block(std::string_view module, at::Tensor output) const {
  return shards_->leave_block(module, std::move(output));
}

}  // namespace isoshard
