// SPDX-License-Identifier: Apache-2.0
/// One collective call as plain data. Ranks compare it at entry, and the journal keeps it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/axis.h"
#include "core/base/dtype.h"
#include "core/comm/call_info.h"
#include "core/comm/communicator.h"

namespace isoshard {

enum class CollectiveOp : std::uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kBarrier,
  kSplit,
  kAllGatherUneven,
  kReduceScatterUneven,
  kAllToAll,
  kSend,
  kRecv,
  kSendRecv,  ///< a grouped call; the journal keeps its sends and recvs instead
};
inline constexpr int kNumCollectiveOps = static_cast<int>(CollectiveOp::kSendRecv) + 1;
inline constexpr int kNumPurposes = static_cast<int>(Purpose::kSetup) + 1;
inline constexpr int kMaxRanks = 1024;  ///< of a world; a backend may have a limit of its own
inline constexpr std::uint32_t kMaxGroups = 512;  ///< of two ranks and more, per rank
inline constexpr std::uint64_t kGroupOfOne = ~std::uint64_t{0};  ///< the id of every group of one

/// all_reduce, all_gather, reduce_scatter, broadcast, barrier, split, all_gather_uneven,
/// reduce_scatter_uneven, all_to_all, send, recv, send_recv.
[[nodiscard]] std::string_view name_of(CollectiveOp op) noexcept;

/// One rank's call. `count` is in elements: data, all_gather's input, reduce_scatter's output, of
/// uneven blocks their sum, all_to_all's input.
struct CollectiveCall {
  CollectiveOp op = CollectiveOp::kBarrier;
  Purpose purpose = Purpose::kUnspecified;
  Axis axis = Axis::kWorld;
  Dtype dtype = Dtype::kUint8;
  Reduction reduction = Reduction::kSum;
  std::int32_t root = 0;  ///< of send and recv: the world rank of the other side
  std::int64_t count = 0;
  std::uint64_t group_id = 0;
  /// The number of this call on its group, counted from 1; it is equal on all ranks of the group.
  std::uint64_t group_sequence = 0;
};

/// Whether the calls of two ranks belong together. All fields must be equal except the axis, which
/// only names the group, and the count of all_to_all, which each rank chooses. A send belongs to a
/// recv of the same purpose, dtype and count.
[[nodiscard]] bool matches(const CollectiveCall& a, const CollectiveCall& b) noexcept;

/// "all_reduce #7 (grad_reduce, dp, sum, fp32 x 1024)"; the root stands in a broadcast's, no data
/// in a barrier's.
[[nodiscard]] std::string in_words(const CollectiveCall& call);

}  // namespace isoshard
