// SPDX-License-Identifier: Apache-2.0
/// Layout of a world's region: header, journal, then group blocks, each followed by the windows of
/// its ranks.
#include "core/comm/region/region.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "core/base/error.h"
#include "core/comm/region/futex.h"

namespace isoshard {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kReasonBytes = 2048;
/// Of the whole world; address space only, pages are reserved as they are used
constexpr std::size_t kMaxSplits = 64;

constexpr std::size_t round_up(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::is_trivially_copyable_v<Announcement>);

int checked(int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRegionRanks) {
    throw UsageError(
        fmt::format("the number of ranks must be from 1 to {} where ranks share memory, got {}; "
                    "start more with mpirun -n {} and --attach",
                    kMaxRegionRanks, num_ranks, num_ranks));
  }
  return num_ranks;
}

ReductionOrder checked(ReductionOrder order) {
  if (order == ReductionOrder::kNative) {
    throw UsageError(
        "reduction order native is not available on this backend; choose ordered, ring or tree");
  }
  return order;
}

}  // namespace

// Each aborter writes its own text and then tries to be the first: a rank that dies while it writes
// harms nobody.
struct WorldRegion::Header {
  struct Reason {
    std::atomic<std::uint32_t> is_taken;
    std::array<char, kReasonBytes - sizeof(std::uint32_t)> text;
  };
  std::atomic<std::uint32_t> abort_word;  ///< 0, or kind << 8 | 1 + the aborter's rank
  std::atomic<std::int64_t> deadline_ns;  ///< of the steady clock; 0 means none
  std::atomic<std::uint64_t> used_bytes;  ///< of the region; group blocks are never given back
  std::atomic<std::uint32_t> num_groups;
  /// Offset of the newest block; each names the next older one
  std::atomic<std::uint64_t> first_group;
  std::array<Reason, kMaxRegionRanks + 1> reasons;
  struct alignas(64) Bell {
    std::atomic<std::uint32_t> count, sleepers;
  };
  std::array<Bell, kMaxRegionRanks> bells;
};

namespace {

constexpr std::size_t kGroupBytes = round_up(sizeof(GroupBlock));

}  // namespace

std::size_t WorldRegion::capacity_for(int num_ranks) {
  const auto ranks = static_cast<std::size_t>(checked(num_ranks));
  return round_up(sizeof(Header)) + round_up(Journal::bytes(num_ranks)) +
         (kMaxSplits + 1) * ranks * (kGroupBytes + kWindowBytes);
}

WorldRegion::WorldRegion(RegionMemory memory, int num_ranks, ReductionOrder order)
    : memory_(std::move(memory)),
      num_ranks_(checked(num_ranks)),
      order_(checked(order)),
      journal_(memory_.data + round_up(sizeof(Header)), num_ranks) {
  const std::size_t fixed_bytes = round_up(sizeof(Header)) + round_up(Journal::bytes(num_ranks));
  memory_.reserve(0, fixed_bytes + kGroupBytes);  // with the world's block
  ::new (memory_.data) Header;                    // not {}: the texts are zero already
  header().used_bytes.store(fixed_bytes);
  std::array<int, kMaxRegionRanks> all{};
  for (int rank = 0; rank < num_ranks; ++rank) all[static_cast<std::size_t>(rank)] = rank;
  static_cast<void>(make_group({all.data(), static_cast<std::size_t>(num_ranks)}));
}

WorldRegion::Header& WorldRegion::header() const noexcept {
  return *std::launder(reinterpret_cast<Header*>(memory_.data));
}

GroupBlock& WorldRegion::world_group() const noexcept {
  return group_at(round_up(sizeof(Header)) + round_up(Journal::bytes(num_ranks_)));
}

GroupBlock& WorldRegion::group_at(std::uint64_t offset) const noexcept {
  return *std::launder(reinterpret_cast<GroupBlock*>(memory_.data + offset));
}

std::uint64_t WorldRegion::make_group(std::span<const int> world_ranks) {
  Header& head = header();
  const std::uint64_t bytes = kGroupBytes + world_ranks.size() * kWindowBytes;
  const std::uint64_t offset = head.used_bytes.fetch_add(bytes);
  const std::uint32_t id = head.num_groups.fetch_add(1);
  if (offset + bytes > memory_.capacity || id >= kMaxGroups) {
    throw InfrastructureError(
        fmt::format("split: there is no room for group {} of {} ranks, because the world's {} MiB "
                    "are used up; split once and "
                    "keep the groups instead of splitting again",
                    id, world_ranks.size(), memory_.capacity >> 20));
  }
  memory_.reserve(offset, kGroupBytes);
  auto* const group = ::new (memory_.data + offset) GroupBlock{};
  group->id = id;
  group->size = static_cast<std::int32_t>(world_ranks.size());
  group->windows_offset = offset + kGroupBytes;
  std::ranges::copy(world_ranks, group->world_ranks.begin());
  std::uint64_t older = head.first_group.load();
  do {
    group->next_offset = older;
  } while (!head.first_group.compare_exchange_weak(older, offset));
  // An abort that walked the list before this block was in it has not released its waiters.
  if (is_aborted()) release_waiters(group->epoch);
  return offset;
}

GroupBlock& WorldRegion::channel_of(GroupBlock& group, int from, int to) {
  const auto sender = static_cast<std::size_t>(from), receiver = static_cast<std::size_t>(to);
  std::atomic<std::uint64_t>& known = group.channel_offsets[sender][receiver];
  std::uint64_t offset = known.load();
  if (offset == 0) {
    const std::array<int, 2> world_ranks = {group.world_ranks[sender], group.world_ranks[receiver]};
    const std::uint64_t made = make_group(world_ranks);
    // else the other side was first: its block is the channel's
    if (known.compare_exchange_strong(offset, made)) offset = made;
  }
  return group_at(offset);
}

std::byte* WorldRegion::window(const GroupBlock& group, int rank) const noexcept {
  return memory_.data + group.windows_offset + static_cast<std::size_t>(rank) * kWindowBytes;
}

void WorldRegion::reserve_window(const GroupBlock& group, int rank, std::size_t begin,
                                 std::size_t end) {
  memory_.reserve(group.windows_offset + static_cast<std::size_t>(rank) * kWindowBytes + begin,
                  end - begin);
}

void WorldRegion::abort(int rank, AbortKind kind, std::string_view reason) noexcept {
  Header& head = header();
  Header::Reason& own = head.reasons[static_cast<std::size_t>(rank)];
  if (own.is_taken.exchange(1) == 0) {
    const std::size_t length = std::min(reason.size(), own.text.size() - 1);
    std::memcpy(own.text.data(), reason.data(), length);
    own.text[length] = '\0';
    std::uint32_t nobody = 0;
    head.abort_word.compare_exchange_strong(
        nobody, static_cast<std::uint32_t>(kind) << 8 | static_cast<std::uint32_t>(rank + 1));
  }
  if (!is_aborted()) return;  // another thread holds this rank's text and is about to publish it
  for (std::uint64_t offset = head.first_group.load(); offset != 0;
       offset = group_at(offset).next_offset) {
    release_waiters(group_at(offset).epoch);
  }
  for (int waiting = 0; waiting < num_ranks_; ++waiting) release_waiters(bell(waiting));
}

void WorldRegion::release_waiters(std::atomic<std::uint32_t>& epoch) const noexcept {
  epoch.fetch_or(1);
  futex_wake_all(epoch);
}

std::atomic<std::uint32_t>& WorldRegion::bell(int world_rank) const noexcept {
  return header().bells[static_cast<std::size_t>(world_rank)].count;
}

std::atomic<std::uint32_t>& WorldRegion::sleepers(int world_rank) const noexcept {
  return header().bells[static_cast<std::size_t>(world_rank)].sleepers;
}

// Both orders are seq_cst: who is about to sleep has counted itself, or sees the new count.
void WorldRegion::ring(int world_rank) const noexcept {
  std::atomic<std::uint32_t>& own = bell(world_rank);
  own.fetch_add(2);
  if (sleepers(world_rank).load() != 0) futex_wake_all(own);
}

bool WorldRegion::is_aborted() const noexcept {
  return header().abort_word.load() != 0;
}

void WorldRegion::throw_abort() const {
  const std::uint32_t word = header().abort_word.load();
  const std::string reason = header().reasons[(word & 0xffU) - 1].text.data();
  if (static_cast<AbortKind>(word >> 8) == AbortKind::kTimeout) throw TimeoutError(reason);
  throw CommError(reason);
}

void WorldRegion::set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
  const auto since_start =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
  header().deadline_ns.store(std::max<std::int64_t>(since_start, 1));
}

std::optional<std::chrono::steady_clock::time_point> WorldRegion::deadline() const noexcept {
  const std::int64_t since_start = header().deadline_ns.load(std::memory_order_relaxed);
  if (since_start == 0) return std::nullopt;
  return std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::nanoseconds(since_start)));
}

}  // namespace isoshard
