// SPDX-License-Identifier: Apache-2.0
/// Names, comparison and wording of collective calls.
#include "core/comm/collective.h"

#include <fmt/format.h>

namespace isoshard {

std::string_view name_of(CollectiveOp op) noexcept {
  switch (op) {
    case CollectiveOp::kAllReduce:
      return "all_reduce";
    case CollectiveOp::kAllGather:
      return "all_gather";
    case CollectiveOp::kReduceScatter:
      return "reduce_scatter";
    case CollectiveOp::kBroadcast:
      return "broadcast";
    case CollectiveOp::kBarrier:
      return "barrier";
    case CollectiveOp::kSplit:
      return "split";
    case CollectiveOp::kAllGatherUneven:
      return "all_gather_uneven";
    case CollectiveOp::kReduceScatterUneven:
      return "reduce_scatter_uneven";
    case CollectiveOp::kAllToAll:
      return "all_to_all";
    case CollectiveOp::kSend:
      return "send";
    case CollectiveOp::kRecv:
      return "recv";
    case CollectiveOp::kSendRecv:
      return "send_recv";
  }
  return "unknown";
}

bool matches(const CollectiveCall& a, const CollectiveCall& b) noexcept {
  const bool is_transfer = (a.op == CollectiveOp::kSend && b.op == CollectiveOp::kRecv) ||
                           (a.op == CollectiveOp::kRecv && b.op == CollectiveOp::kSend);
  const bool fits = is_transfer || (a.op == b.op && a.root == b.root &&
                                    a.op != CollectiveOp::kSend && a.op != CollectiveOp::kRecv);
  return fits && a.purpose == b.purpose && a.dtype == b.dtype && a.reduction == b.reduction &&
         (a.count == b.count || a.op == CollectiveOp::kAllToAll) && a.group_id == b.group_id &&
         a.group_sequence == b.group_sequence;
}

std::string in_words(const CollectiveCall& call) {
  std::string text = fmt::format("{} #{} ({}, {}", name_of(call.op), call.group_sequence,
                                 name_of(call.purpose), name_of(call.axis));
  if (call.op == CollectiveOp::kAllReduce || call.op == CollectiveOp::kReduceScatter ||
      call.op == CollectiveOp::kReduceScatterUneven) {
    text += fmt::format(", {}", name_of(call.reduction));
  }
  if (call.op == CollectiveOp::kBroadcast) text += fmt::format(", root {}", call.root);
  if (call.op == CollectiveOp::kSend) text += fmt::format(", to rank {}", call.root);
  if (call.op == CollectiveOp::kRecv) text += fmt::format(", from rank {}", call.root);
  if (call.op != CollectiveOp::kBarrier && call.op != CollectiveOp::kSplit) {
    text += fmt::format(", {} x {}", name_of(call.dtype), call.count);
  }
  return text + ")";
}

}  // namespace isoshard
