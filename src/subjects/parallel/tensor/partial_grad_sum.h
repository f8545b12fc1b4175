// SPDX-License-Identifier: Apache-2.0
/// Gradients of parameters that several tp ranks hold alike, each of them seeing a part of their
/// use.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/comm/communicator.h"
#include "subjects/parallel/tensor/shard_plan.h"

namespace isoshard {

/// Adds up what each holder of a parameter found as its gradient. There are three kinds of such
/// parameters:
///
/// kKvReplica   a kv head that is copied to several ranks: every holder's query heads give a part.
/// kQkNorm   a norm over each head of q or k, whole on every rank: every rank has the heads that it
/// holds only. kNorm, kRowBias, kPosition   with the sequence split over tp: every rank sees its
/// part of the tokens only. One call for all.
///
/// Ranks        constructor and reduce are collective over `tp`: one split if kv heads are copied,
///              and per reduce one all-reduce of each kind that the model has (grad_reduce, axis
///              tp, one segment per parameter, of its class).
/// Guarantees   afterwards the copies' gradients are bit-equal, so the copies stay equal. A group
///              of one is left alone.
/// Determinism  as the communicator's reduction order.
///
///     PartialGradSum sum(specs, plan, tp);
///     sum.reduce(gradients);
class PartialGradSum {
 public:
  PartialGradSum(const std::vector<ParameterSpec>& specs, const ShardPlan& plan, Communicator& tp,
                 bool splits_sequence = false);
  /// Whose gradients reduce() adds up: nobody's, those of the holders of a kv head, or all of tp.
  enum class Over : std::uint8_t { kNobody, kHolders, kTp };
  [[nodiscard]] Over over(std::string_view parameter) const noexcept;
  /// In place.
  void reduce(const std::map<std::string, at::Tensor, std::less<>>& gradients);

 private:
  std::vector<std::pair<std::string, ParamClass>> kv_parameters_, qk_norms_, sequence_parameters_;
  std::unique_ptr<Communicator> holders_;  ///< of this rank's kv head; null if none is copied
  Communicator* tp_;
};

}  // namespace isoshard
