// SPDX-License-Identifier: Apache-2.0
/// The one implementation of collectives over shared memory; shm and thread differ only in how the
/// region comes to be.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/region/region.h"
#include "core/comm/region/region_channel.h"

namespace isoshard {

/// A rank's end of one group in a WorldRegion, which must outlive it. All data of a collective has
/// moved when its call returns, so its Work is done, and failures are thrown by the call itself.
/// send_recv returns at once: what it sends is on its way, and what it receives is there when its
/// Work is waited for. What is on its way moves on in every later call of the rank.
class RegionCommunicator final : public Communicator {
 public:
  /// The group of the whole world.
  RegionCommunicator(WorldRegion& region, int world_rank);

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return region_->reduction_order();
  }
  [[nodiscard]] int world_rank_of(int rank) const override;

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override;
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override;
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                      const CallInfo& info) override;
  using Communicator::all_to_all;
  Work all_gather_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                         const CallInfo& info) override;
  Work reduce_scatter_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             Reduction reduction, const CallInfo& info) override;
  Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                  std::span<const std::int64_t> output_counts, const CallInfo& info) override;
  Work send(ConstBuffer data, int to, const CallInfo& info) override;
  Work recv(Buffer data, int from, const CallInfo& info) override;
  Work send_recv(std::span<const Transfer> transfers) override;
  Work broadcast(Buffer data, int root, const CallInfo& info) override;
  void barrier(const CallInfo& info) override;
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override;
  void abort(std::string_view reason) noexcept override;
  /// Whether a transfer of this rank, in whatever group, is still on its way after its last call.
  [[nodiscard]] bool has_transfers_under_way() const noexcept { return !channels_->is_idle(); }

 private:
  /// From entry to end of one call: what was announced, and whether the ranks have already compared
  /// it.
  struct Call {
    CollectiveCall call;
    std::uint64_t sequence = 0;
    bool is_compared = false;
  };
  struct ChunkOfSlices;

  RegionCommunicator(WorldRegion& region, int world_rank, GroupBlock* group, int rank,
                     std::shared_ptr<RankChannels> channels);

  [[nodiscard]] Call enter(CollectiveCall call, const CallInfo& info);
  void announce(const Call& call, int color, int key) noexcept;
  void meet_others(Call& call);
  void compare_announcements(const CollectiveCall& own);
  void leave(const Call& call) noexcept;

  [[nodiscard]] Announcement& announcement_of(int rank, const CollectiveCall& call) const noexcept;
  /// The buffer of `rank` that the current chunk uses.
  [[nodiscard]] std::byte* buffer(int rank, std::uint64_t chunk) const noexcept;
  /// This rank's own, with at least `bytes` of it reserved.
  [[nodiscard]] std::byte* own_buffer(std::uint64_t chunk, std::size_t bytes);

  void gather_blocks(Call& call, ConstBuffer input, Buffer output, const Counts& counts);
  void reduce_blocks(Call& call, ConstBuffer input, Buffer output, const Counts& counts);
  struct Queued;
  [[nodiscard]] ChannelEnd& channel(int peer, bool is_send);
  [[nodiscard]] Queued queue(bool is_send, int peer, Buffer data, const CallInfo& info,
                             bool must_be_taken = false);
  [[noreturn]] void fail(const std::string& reason);

  void all_reduce_at_once(Call& call, Buffer data);
  void all_reduce_in_slices(Call& call, Buffer data);
  void publish_slices(const ChunkOfSlices& chunk);
  void reduce_own_slice(const ChunkOfSlices& chunk, const CollectiveCall& call);
  void collect_slices(const ChunkOfSlices& chunk) const;
  [[nodiscard]] std::unique_ptr<Communicator> join_new_group(Call& call, int color);

  WorldRegion* region_;
  GroupBlock* group_;  ///< null for a group of one
  int world_rank_;
  int rank_;
  int size_;
  std::uint64_t group_sequence_ = 0;
  /// Ever moved through the windows: even ones use the first buffer.
  std::uint64_t num_chunks_ = 0;
  std::array<std::size_t, 2> reserved_bytes_{};
  std::shared_ptr<RankChannels> channels_;            ///< of all groups of the rank
  std::map<std::pair<int, bool>, ChannelEnd*> ends_;  ///< of this group, by peer and direction
};

}  // namespace isoshard
