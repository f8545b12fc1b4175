// SPDX-License-Identifier: Apache-2.0
/// Announcements of a group, all of which must agree.
#include "core/comm/control/group_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/comm/mismatch.h"

namespace isoshard {
namespace {

std::shared_ptr<const CommGroup> world_group(int size) {
  auto group = std::make_shared<CommGroup>();
  group->world_ranks.resize(static_cast<std::size_t>(size));
  std::iota(group->world_ranks.begin(), group->world_ranks.end(), 0);
  for (const int rank : group->world_ranks) group->members.insert(rank);
  return group;
}

}  // namespace

Packet packet_of(CollectiveCall call, std::span<const std::int64_t> counts,
                 std::span<const std::int64_t> output_counts) {
  Packet packet;
  packet.entry.call = call;
  packet.counts.assign(counts.begin(), counts.end());
  packet.output_counts.assign(output_counts.begin(), output_counts.end());
  return packet;
}

GroupCalls::GroupCalls(ControlEndpoint& endpoint)
    : GroupCalls(endpoint, world_group(endpoint.size()), endpoint.rank()) {}

int GroupCalls::world_rank_of(int rank) const {
  if (rank < 0 || rank >= size_)
    throw CommError(
        fmt::format("the rank must be from 0 to {} in this group, got {}", size_ - 1, rank));
  return group_->world_ranks[static_cast<std::size_t>(rank)];
}

MetCall GroupCalls::meet(Packet own, const CallInfo& info) {
  ControlEndpoint& endpoint = *endpoint_;
  endpoint.poll();
  if (endpoint.is_aborted()) endpoint.throw_abort();
  CollectiveCall& call = own.entry.call;
  call.purpose = info.purpose;
  call.axis = info.axis;
  call.group_id = group_->id();
  call.group_sequence = ++group_sequence_;
  own.entry.group_size = static_cast<std::uint32_t>(size_);
  own.entry.group_members = group_->members;
  MetCall started{call, endpoint.journal().enter(endpoint.rank(), own.entry)};
  if (size_ > 1) {
    const auto bytes = encode(own);
    for (int step = 1; step < size_; ++step)
      endpoint.post(world_rank_of((rank_ + step) % size_), bytes);
  }
  // A rank whose packet has come may leave the world before the others' packets come.
  RankSet awaited = group_->members;
  awaited.erase(endpoint.rank());
  const auto have_come = [&] {
    for (const int member : group_->world_ranks) {
      if (awaited.contains(member) &&
          endpoint.waiting_packet(started.call.group_id, member) != nullptr)
        awaited.erase(member);
    }
    return awaited == RankSet{};
  };
  if (size_ > 1) endpoint.wait_until(have_come, /*moves_data=*/false, &awaited);
  for (int member = 0; member < size_; ++member) {
    started.packets.push_back(
        member == rank_ ? std::move(own)
                        : endpoint.take_packet(started.call.group_id, world_rank_of(member)));
  }
  compare(started);
  return started;
}

void GroupCalls::compare(const MetCall& call) {
  std::vector<AnnouncedCall> calls;
  for (int member = 0; member < size_; ++member) {
    const Packet& packet = call.packets[static_cast<std::size_t>(member)];
    calls.push_back(
        {world_rank_of(member), packet.entry.call, packet.counts, packet.output_counts});
  }
  const std::string mismatch = describe_mismatch(calls);
  if (!mismatch.empty()) endpoint_->fail(mismatch);
}

void GroupCalls::leave(const MetCall& call) noexcept {
  endpoint_->journal().finish(endpoint_->rank(), call.sequence);
}

// The announcements say all that a rank needs to know of its new group.
GroupCalls GroupCalls::split(int color, int key) {
  ControlEndpoint& endpoint = *endpoint_;
  Packet own = packet_of({.op = CollectiveOp::kSplit});
  own.color = color;
  own.key = key;
  own.groups_led = endpoint.num_groups_led();
  const MetCall call = meet(std::move(own), {.purpose = Purpose::kSetup, .axis = Axis::kWorld});
  const auto packet_of_member = [&](int member) -> const Packet& {
    return call.packets[static_cast<std::size_t>(member)];
  };
  std::vector<int> members;
  for (int member = 0; member < size_; ++member) {
    if (packet_of_member(member).color == color) members.push_back(member);
  }
  std::ranges::stable_sort(members, {}, [&](int member) { return packet_of_member(member).key; });
  auto group = std::make_shared<CommGroup>();
  for (const int member : members) {
    group->world_ranks.push_back(world_rank_of(member));
    group->members.insert(world_rank_of(member));
  }
  if (members.size() > 1) {
    endpoint.take_group_id();
    const int leader = members.front();
    group->index = CommGroup::index_of(packet_of_member(leader).groups_led, world_rank_of(leader),
                                       endpoint.size());
    if (leader == rank_) endpoint.count_group_led();
  }
  leave(call);
  const auto own_rank = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
  return {endpoint, std::move(group), own_rank};
}

}  // namespace isoshard
