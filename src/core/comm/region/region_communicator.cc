// SPDX-License-Identifier: Apache-2.0
/// Entry, comparison and end of every call on shared memory; split, barrier and the communicator's
/// small parts.
#include "core/comm/region/region_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/base/error.h"
#include "core/comm/mismatch.h"
#include "core/comm/region/meeting.h"

namespace isoshard {

RegionCommunicator::RegionCommunicator(WorldRegion& region, int world_rank)
    : RegionCommunicator(region, world_rank,
                         region.num_ranks() == 1 ? nullptr : &region.world_group(), world_rank,
                         std::make_shared<RankChannels>(region, world_rank)) {}

RegionCommunicator::RegionCommunicator(WorldRegion& region, int world_rank, GroupBlock* group,
                                       int rank, std::shared_ptr<RankChannels> channels)
    : region_(&region),
      group_(group),
      world_rank_(world_rank),
      rank_(rank),
      size_(group == nullptr ? 1 : group->size),
      channels_(std::move(channels)) {}

int RegionCommunicator::world_rank_of(int rank) const {
  if (rank < 0 || rank >= size_)
    throw CommError(
        fmt::format("the rank must be from 0 to {} in this group, got {}", size_ - 1, rank));
  return group_ == nullptr ? world_rank_ : group_->world_ranks[static_cast<std::size_t>(rank)];
}

void RegionCommunicator::abort(std::string_view reason) noexcept {
  region_->abort(world_rank_, WorldRegion::AbortKind::kFailure, reason);
}

RegionCommunicator::Call RegionCommunicator::enter(CollectiveCall call, const CallInfo& info) {
  if (region_->is_aborted()) region_->throw_abort();
  channels_->advance();
  call.purpose = info.purpose;
  call.axis = info.axis;
  call.group_id = group_ == nullptr ? kGroupOfOne : group_->id;
  call.group_sequence = ++group_sequence_;
  JournalEntry entry;
  entry.call = call;
  entry.group_size = static_cast<std::uint32_t>(size_);
  for (int member = 0; member < size_; ++member) entry.group_members.insert(world_rank_of(member));
  Call started{call, region_->journal().enter(world_rank_, entry), false};
  if (group_ != nullptr) announce(started, 0, 0);
  return started;
}

Announcement& RegionCommunicator::announcement_of(int rank,
                                                  const CollectiveCall& call) const noexcept {
  return group_->announcements[static_cast<std::size_t>(rank)][call.group_sequence % 2];
}

void RegionCommunicator::announce(const Call& call, int color, int key) noexcept {
  Announcement& own = announcement_of(rank_, call.call);
  own.call = call.call;
  own.color = color;
  own.key = key;
}

void RegionCommunicator::meet_others(Call& call) {
  meet(*region_, *group_, world_rank_, [this] { return channels_->advance(); });
  if (call.is_compared) return;
  call.is_compared = true;
  compare_announcements(call.call);
}

// Every rank compares all with the group's first, so that all report the same, and none continues.
void RegionCommunicator::compare_announcements(const CollectiveCall& own) {
  bool is_same = own.op != CollectiveOp::kAllGatherUneven &&
                 own.op != CollectiveOp::kReduceScatterUneven && own.op != CollectiveOp::kAllToAll;
  for (int other = 0; other < size_ && is_same; ++other)
    is_same = matches(own, announcement_of(other, own).call);
  if (is_same) return;
  std::array<AnnouncedCall, kMaxRegionRanks> calls;  // NOLINT: filled for the ranks of the group
  const auto size = static_cast<std::size_t>(size_);
  for (int member = 0; member < size_; ++member) {
    const Announcement& theirs = announcement_of(member, own);
    calls[static_cast<std::size_t>(member)] = {world_rank_of(member), theirs.call,
                                               std::span(theirs.counts).first(size),
                                               std::span(theirs.output_counts).first(size)};
  }
  const std::string mismatch = describe_mismatch({calls.data(), size});
  if (!mismatch.empty()) fail(mismatch);
}

void RegionCommunicator::fail(const std::string& reason) {
  region_->abort(world_rank_, WorldRegion::AbortKind::kFailure, reason);
  region_->throw_abort();
}

void RegionCommunicator::leave(const Call& call) noexcept {
  region_->journal().finish(world_rank_, call.sequence);
}

std::byte* RegionCommunicator::buffer(int rank, std::uint64_t chunk) const noexcept {
  return region_->window(*group_, rank) + chunk % 2 * kBufferBytes;
}

std::byte* RegionCommunicator::own_buffer(std::uint64_t chunk, std::size_t bytes) {
  constexpr std::size_t kStep = std::size_t{16} << 10;
  std::size_t& reserved = reserved_bytes_[chunk % 2];
  if (bytes > reserved) {
    const std::size_t wanted = std::min(kBufferBytes, (bytes + kStep - 1) / kStep * kStep);
    const std::size_t begin = chunk % 2 * kBufferBytes;
    try {
      region_->reserve_window(*group_, rank_, begin + reserved, begin + wanted);
    } catch (const InfrastructureError& error) {
      abort(fmt::format("rank {}: {}", world_rank_, error.what()));
      throw;
    }
    reserved = wanted;
  }
  return buffer(rank_, chunk);
}

void RegionCommunicator::barrier(const CallInfo& info) {
  Call call = enter({.op = CollectiveOp::kBarrier}, info);
  if (group_ != nullptr) meet_others(call);
  leave(call);
}

std::unique_ptr<Communicator> RegionCommunicator::split(int color, int key) {
  Call call =
      enter({.op = CollectiveOp::kSplit}, {.purpose = Purpose::kSetup, .axis = Axis::kWorld});
  std::unique_ptr<Communicator> result;
  if (group_ == nullptr) {
    result.reset(new RegionCommunicator(*region_, world_rank_, nullptr, 0, channels_));
  } else {
    announce(call, color, key);
    meet_others(call);
    result = join_new_group(call, color);
  }
  leave(call);
  return result;
}

// The first rank of each new group makes its block and announces its place to the others.
std::unique_ptr<Communicator> RegionCommunicator::join_new_group(Call& call, int color) {
  std::vector<int> members;
  for (int member = 0; member < size_; ++member) {
    if (announcement_of(member, call.call).color == color) members.push_back(member);
  }
  std::ranges::stable_sort(members, {},
                           [&](int member) { return announcement_of(member, call.call).key; });
  const int first = members.front();
  if (rank_ == first && members.size() > 1) {
    std::vector<int> world_ranks;
    for (const int member : members) world_ranks.push_back(world_rank_of(member));
    try {
      announcement_of(rank_, call.call).group_offset = region_->make_group(world_ranks);
    } catch (const InfrastructureError& error) {
      abort(fmt::format("rank {}: {}", world_rank_, error.what()));
      throw;
    }
  }
  meet_others(call);
  if (members.size() == 1) {
    return std::unique_ptr<Communicator>(
        new RegionCommunicator(*region_, world_rank_, nullptr, 0, channels_));
  }
  GroupBlock& group = region_->group_at(announcement_of(first, call.call).group_offset);
  const auto own = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
  return std::unique_ptr<Communicator>(
      new RegionCommunicator(*region_, world_rank_, &group, own, channels_));
}

}  // namespace isoshard
