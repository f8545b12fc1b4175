// SPDX-License-Identifier: Apache-2.0
/// The memory that the ranks of a world share, and what is in it: abort flag, deadline, journal,
/// groups with their windows.
///
/// Words. A *group block* holds what the ranks of one group exchange. Each of its ranks owns one
/// *window* of two *buffers*: a rank writes only its own window, others read it after the next
/// meeting. Memory of windows is reserved by its owner when it first needs it.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/comm/collective.h"
#include "core/comm/journal.h"

namespace isoshard {

/// Of a world whose ranks share memory. A block of a group holds what all of them say, so it grows
/// with the square of this.
inline constexpr int kMaxRegionRanks = 16;
inline constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
inline constexpr std::size_t kWindowBytes = 2 * kBufferBytes;
inline constexpr std::uint32_t kChannelSlots = 8;

/// Zeroed memory at one address in all ranks. `reserve` makes sure that a range exists (page
/// granular); it throws InfrastructureError if it cannot.
struct RegionMemory {
  std::byte* data = nullptr;
  std::size_t capacity = 0;
  std::function<void(std::size_t offset, std::size_t bytes)> reserve;
};

/// Elements by group rank.
using Counts = std::array<std::int64_t, kMaxRegionRanks>;

/// What a rank says about its call before it meets the others.
struct Announcement {
  CollectiveCall call;
  std::int32_t color = 0;  ///< split
  std::int32_t key = 0;    ///< split
  /// Split: the block that this rank made, as the first of its new group.
  std::uint64_t group_offset = 0;
  Counts counts{};         ///< uneven calls: of the blocks; all_to_all: for each rank
  Counts output_counts{};  ///< all_to_all: from each rank
};

/// Lives in the region. `epoch` counts the meetings of the group, times two; its last bit says that
/// the world is aborted, so that whoever waits for the epoch to change is released by an abort as
/// by a meeting.
struct GroupBlock {
  std::uint32_t id = 0;
  std::int32_t size = 0;
  std::uint64_t windows_offset = 0;
  std::uint64_t next_offset = 0;
  std::array<std::int32_t, kMaxRegionRanks> world_ranks{};
  /// The blocks through which one rank sends to another, by both; made when they first do, 0 until
  /// then.
  std::array<std::array<std::atomic<std::uint64_t>, kMaxRegionRanks>, kMaxRegionRanks>
      channel_offsets{};
  alignas(64) std::atomic<std::uint32_t> arrived{0};
  alignas(64) std::atomic<std::uint32_t> epoch{0};
  std::atomic<std::uint32_t> sleepers{0};
  /// Two each, used in turn: a rank that is one call ahead does not overwrite what others still
  /// read.
  alignas(64) std::array<std::array<Announcement, 2>, kMaxRegionRanks> announcements{};
  /// Of a channel (region_channel.h): pieces ever posted by its rank 0 and taken by its rank 1, and
  /// the calls that those in the slots belong to.
  alignas(64) std::atomic<std::uint32_t> posted{0};
  alignas(64) std::atomic<std::uint32_t> taken{0};
  std::array<CollectiveCall, kChannelSlots> messages{};
};

/// Requires     made once by the controller, before any rank runs; `memory` outlives it.
/// Guarantees   all members but the constructor may be called by any rank at any time.
class WorldRegion {
 public:
  enum class AbortKind : std::uint8_t { kFailure = 1, kTimeout = 2 };

  /// Errors   UsageError for num_ranks outside 1..16, and for kNative (there is no library below
  ///          whose order it could be); InfrastructureError if the memory cannot be reserved.
  WorldRegion(RegionMemory memory, int num_ranks, ReductionOrder order);
  [[nodiscard]] static std::size_t capacity_for(int num_ranks);

  [[nodiscard]] int num_ranks() const noexcept { return num_ranks_; }
  /// Of every group of the world.
  [[nodiscard]] ReductionOrder reduction_order() const noexcept { return order_; }
  [[nodiscard]] Journal& journal() noexcept { return journal_; }
  [[nodiscard]] const Journal& journal() const noexcept { return journal_; }

  [[nodiscard]] GroupBlock& world_group() const noexcept;
  [[nodiscard]] GroupBlock& group_at(std::uint64_t offset) const noexcept;
  /// Makes a block for a new group of two ranks or more and returns its offset.
  /// Errors   InfrastructureError if the world has too many groups or the memory cannot be
  ///          reserved.
  [[nodiscard]] std::uint64_t make_group(std::span<const int> world_ranks);

  /// The block of what one rank of `group` sends to another, made by who first asks.
  /// Errors   as make_group.
  [[nodiscard]] GroupBlock& channel_of(GroupBlock& group, int from, int to);

  /// Counts what happened in the channels of a world rank, times two; its last bit says that the
  /// world is aborted. `sleepers` of it wait for it to change.
  [[nodiscard]] std::atomic<std::uint32_t>& bell(int world_rank) const noexcept;
  [[nodiscard]] std::atomic<std::uint32_t>& sleepers(int world_rank) const noexcept;
  /// Tells a rank that something happened.
  void ring(int world_rank) const noexcept;

  [[nodiscard]] std::byte* window(const GroupBlock& group, int rank) const noexcept;
  void reserve_window(const GroupBlock& group, int rank, std::size_t begin, std::size_t end);

  /// `rank` is the world rank that aborts, num_ranks() for the controller. The first reason given
  /// stays.
  void abort(int rank, AbortKind kind, std::string_view reason) noexcept;
  [[nodiscard]] bool is_aborted() const noexcept;
  /// Errors   always: CommError or TimeoutError with the reason given. Only when is_aborted().
  [[noreturn]] void throw_abort() const;

  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept;
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> deadline() const noexcept;

 private:
  struct Header;
  [[nodiscard]] Header& header() const noexcept;
  void release_waiters(std::atomic<std::uint32_t>& epoch) const noexcept;

  RegionMemory memory_;
  int num_ranks_;
  ReductionOrder order_;
  Journal journal_;
};

}  // namespace isoshard
