// SPDX-License-Identifier: Apache-2.0
/// Gradients of kv heads that several tp ranks hold alike.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "parallel/tensor/shard_plan.h"

namespace isoshard {

/// Adds up what each holder of a kv head found as its gradient: every holder's query heads give a part of it.
///
/// Ranks        constructor and reduce are collective over `tp`: one split, and per reduce one all-reduce (grad_reduce, axis tp,
///              one segment of class kv_replica per parameter) in each group of ranks that hold the same kv head.
/// Guarantees   afterwards the copies' gradients are bit-equal, so the copies stay equal.
/// Determinism  as the communicator's reduction order.
///
///     KvReplicaSum sum(specs, plan, tp);
///     sum.reduce(gradients);
class KvReplicaSum {
 public:
  KvReplicaSum(const std::vector<ParameterSpec>& specs, const ShardPlan& plan, Communicator& tp);
  /// In place.
  void reduce(const std::map<std::string, at::Tensor, std::less<>>& gradients);

 private:
  std::vector<std::string> names_;
  std::unique_ptr<Communicator> holders_;  ///< of this rank's kv head
};

}  // namespace isoshard
