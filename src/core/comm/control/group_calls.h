// SPDX-License-Identifier: Apache-2.0
/// Entry, comparison and end of every call of a group, and its division into new ones: the part of
/// a communicator that only sends packets.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/comm/control/comm_group.h"
#include "core/comm/control/control_endpoint.h"

namespace isoshard {

/// A collective that all ranks of its group have announced.
struct MetCall {
  CollectiveCall call;
  std::uint64_t sequence = 0;
  std::vector<Packet> packets{};  ///< by group rank
};

/// A rank's calls on one group.
class GroupCalls {
 public:
  GroupCalls(ControlEndpoint& endpoint, std::shared_ptr<const CommGroup> group, int rank)
      : endpoint_(&endpoint),
        group_(std::move(group)),
        rank_(rank),
        size_(static_cast<int>(group_->world_ranks.size())) {}
  /// The group of all ranks.
  explicit GroupCalls(ControlEndpoint& endpoint);

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] const CommGroup& group() const noexcept { return *group_; }
  /// Errors   CommError for a rank that the group does not have.
  [[nodiscard]] int world_rank_of(int rank) const;

  /// Announces the call, with `own` filled by the caller, and returns the packets of all ranks of
  /// the group, own included, once they are there and agree.
  /// Ranks    collective over the group.
  /// Errors   as ControlEndpoint::wait_until; CommError on every rank if the calls differ.
  [[nodiscard]] MetCall meet(Packet own, const CallInfo& info);
  /// Writes into the journal that the call is over.
  void leave(const MetCall& call) noexcept;

  /// The calls of the new group that this rank belongs to.
  /// Ranks    collective over the group.
  /// Errors   as meet(), and as ControlEndpoint::take_group_id.
  [[nodiscard]] GroupCalls split(int color, int key);

 private:
  void compare(const MetCall& call);

  ControlEndpoint* endpoint_;
  std::shared_ptr<const CommGroup> group_;
  int rank_;
  int size_;
  std::uint64_t group_sequence_ = 0;
};

/// A packet that announces a call.
[[nodiscard]] Packet packet_of(CollectiveCall call, std::span<const std::int64_t> counts = {},
                               std::span<const std::int64_t> output_counts = {});

}  // namespace isoshard
