// SPDX-License-Identifier: Apache-2.0
/// One direction between two ranks: what one sends, the other receives in the same order.
///
/// Words. The sender's window is cut into *slots*. A message goes through them in pieces of a slot,
/// at least one. A piece is *posted* when it is in its slot, and *taken* when the receiver has
/// copied it out; the slot is free then. So a send is over when all of it is posted, whether or not
/// the receiver has come: that is what lets transfers run while both ranks compute.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/region/region.h"

namespace isoshard {

/// One message on its way, as one side sees it.
struct Moving {
  CollectiveCall call;
  Buffer data;
  std::size_t moved_bytes = 0;
  std::uint32_t last_piece = 0;  ///< the number of its last piece, when it is done
  std::uint64_t sequence = 0;    ///< in the rank's journal; 0: not entered yet
  bool must_be_taken = false;    ///< of a send: its call ends when the receiver has all of it
  bool is_done = false;          ///< all of it has moved
};

/// One side's end of a channel. `block` has the sender as its rank 0 and the receiver as rank 1.
///
/// Ranks        local; the other side has an end of its own.
class ChannelEnd {
 public:
  ChannelEnd(WorldRegion& region, GroupBlock& block, int world_rank, bool is_sender);
  /// Queues a message behind the earlier ones. Nothing moves yet.
  [[nodiscard]] std::shared_ptr<Moving> add(CollectiveCall call, Buffer data, bool must_be_taken);
  /// Moves what can be moved without waiting.
  /// Errors   CommError on both sides where a message is not what its receiver expects.
  void advance();
  [[nodiscard]] bool is_idle() const noexcept { return queue_.empty(); }
  /// Writes the message into the journal, as one that this rank waits in. Without it a message is
  /// written when it is done.
  void enter(Moving& moving);
  /// Whether nothing is left to wait for; if so, the journal says so.
  [[nodiscard]] bool is_over(Moving& moving);

 private:
  [[nodiscard]] bool move_piece(Moving& moving);
  void compare(const Moving& expected, const CollectiveCall& sent);
  [[nodiscard]] std::byte* slot(std::uint32_t piece, std::size_t bytes);

  WorldRegion* region_;
  GroupBlock* block_;
  int world_rank_;
  bool is_sender_;
  std::uint64_t num_messages_ = 0;
  std::deque<std::shared_ptr<Moving>> queue_;
  std::vector<bool> is_reserved_;  ///< slots have memory once a sender used them
};

/// All ends of a rank, whatever group they belong to: who waits in one keeps the others moving.
class RankChannels {
 public:
  RankChannels(WorldRegion& region, int world_rank) : region_(&region), world_rank_(world_rank) {}
  [[nodiscard]] ChannelEnd& add(GroupBlock& block, bool is_sender);
  /// Moves what can be moved without waiting. Returns whether something is left.
  bool advance();
  /// Whether nothing is left to move, as far as the last call knew.
  [[nodiscard]] bool is_idle() const noexcept;
  /// Returns when the message is over.   Errors   CommError, TimeoutError as meet().
  void finish(ChannelEnd& end, Moving& moving);

 private:
  WorldRegion* region_;
  int world_rank_;
  std::vector<std::unique_ptr<ChannelEnd>> ends_;
};

}  // namespace isoshard
