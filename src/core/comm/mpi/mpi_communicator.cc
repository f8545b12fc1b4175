// SPDX-License-Identifier: Apache-2.0
/// Entry, comparison and end of every call; split, barrier, transfers.
#include "core/comm/mpi/mpi_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/base/error.h"
#include "core/comm/blocks.h"
#include "core/comm/mismatch.h"
#include "core/comm/mpi/mpi_job.h"

namespace isoshard {
namespace {

Buffer as_buffer(const ConstBuffer& data) {
  // NOLINT: a send only reads it
  return {const_cast<std::byte*>(data.data), data.count, data.dtype, data.device, data.stream};
}

/// Order native reduces in MPI's own communicators.
/// Ranks    collective over the group.
MPI_Comm native_comm(const MpiEndpoint& endpoint, const MpiGroup& made) {
  if (endpoint.reduction_order() != ReductionOrder::kNative || made.world_ranks.size() == 1)
    return MPI_COMM_NULL;
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(endpoint.data_comm(), &world), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(world, static_cast<int>(made.world_ranks.size()),
                           made.world_ranks.data(), &members),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(endpoint.data_comm(), members, made.tag_of_collectives(), &comm),
            "MPI_Comm_create_group");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  return comm;
}

std::shared_ptr<const MpiGroup> world_group(const MpiEndpoint& endpoint) {
  auto group = std::make_shared<MpiGroup>();
  group->world_ranks.resize(static_cast<std::size_t>(endpoint.size()));
  std::iota(group->world_ranks.begin(), group->world_ranks.end(), 0);
  for (const int rank : group->world_ranks) group->members.insert(rank);
  group->native = native_comm(endpoint, *group);
  return group;
}

}  // namespace

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiRank> world)
    : world_(std::move(world)),
      group_(world_group(world_->endpoint)),
      rank_(world_->endpoint.rank()),
      size_(world_->endpoint.size()) {}

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiRank> world,
                                 std::shared_ptr<const MpiGroup> group, int rank)
    : world_(std::move(world)),
      group_(std::move(group)),
      rank_(rank),
      size_(static_cast<int>(group_->world_ranks.size())) {}

int MpiCommunicator::world_rank_of(int rank) const {
  if (rank < 0 || rank >= size_)
    throw CommError(
        fmt::format("the rank must be from 0 to {} in this group, got {}", size_ - 1, rank));
  return group_->world_ranks[static_cast<std::size_t>(rank)];
}

void MpiCommunicator::abort(std::string_view reason) noexcept {
  world_->endpoint.abort(MpiEndpoint::AbortKind::kFailure, reason);
}

MpiCommunicator::Call MpiCommunicator::meet(Packet own, const CallInfo& info) {
  MpiEndpoint& endpoint = world_->endpoint;
  endpoint.poll();
  if (endpoint.is_aborted()) endpoint.throw_abort();
  CollectiveCall& call = own.entry.call;
  call.purpose = info.purpose;
  call.axis = info.axis;
  call.group_id = group_->id();
  call.group_sequence = ++group_sequence_;
  own.entry.group_size = static_cast<std::uint32_t>(size_);
  own.entry.group_members = group_->members;
  Call started{call, endpoint.journal().enter(endpoint.rank(), own.entry)};
  if (size_ > 1) {
    const auto bytes = encode(own);
    for (int step = 1; step < size_; ++step)
      endpoint.post(world_rank_of((rank_ + step) % size_), bytes);
  }
  const auto has_come = [&, next = std::size_t{0}]() mutable {
    // asked in every poll, and a packet that has come stays
    for (; next < group_->world_ranks.size(); ++next) {
      const int member = group_->world_ranks[next];
      if (member != endpoint.rank() &&
          endpoint.waiting_packet(started.call.group_id, member) == nullptr)
        return false;
    }
    return true;
  };
  if (size_ > 1) endpoint.wait_until(has_come, /*moves_data=*/false);
  for (int member = 0; member < size_; ++member) {
    started.packets.push_back(
        member == rank_ ? std::move(own)
                        : endpoint.take_packet(started.call.group_id, world_rank_of(member)));
  }
  compare(started);
  return started;
}

void MpiCommunicator::compare(const Call& call) {
  std::vector<AnnouncedCall> calls;
  for (int member = 0; member < size_; ++member) {
    const Packet& packet = call.packets[static_cast<std::size_t>(member)];
    calls.push_back(
        {world_rank_of(member), packet.entry.call, packet.counts, packet.output_counts});
  }
  const std::string mismatch = describe_mismatch(calls);
  if (!mismatch.empty()) world_->endpoint.fail(mismatch);
}

void MpiCommunicator::leave(const Call& call) noexcept {
  world_->endpoint.journal().finish(world_->endpoint.rank(), call.sequence);
}

void MpiCommunicator::exchange(std::span<const Piece> receives, std::span<const Piece> sends) {
  InFlight in_flight(world_->endpoint);
  const int tag = group_->tag_of_collectives();
  for (const Piece& piece : receives) world_->endpoint.start_receive(piece, tag, in_flight);
  for (const Piece& piece : sends)
    world_->endpoint.start_send(piece, tag, /*must_be_taken=*/false, in_flight);
  world_->endpoint.wait_until([&] { return MpiEndpoint::are_done(in_flight); },
                              /*moves_data=*/true);
}

void MpiCommunicator::barrier(const CallInfo& info) {
  leave(meet({.entry = {.call = {.op = CollectiveOp::kBarrier}}}, info));
}

// The announcements say all that a rank needs to know of its new group.
std::unique_ptr<Communicator> MpiCommunicator::split(int color, int key) {
  MpiEndpoint& endpoint = world_->endpoint;
  const Call call = meet({.entry = {.call = {.op = CollectiveOp::kSplit}},
                          .color = color,
                          .key = key,
                          .groups_led = endpoint.num_groups_led()},
                         {.purpose = Purpose::kSetup, .axis = Axis::kWorld});
  const auto packet_of = [&](int member) -> const Packet& {
    return call.packets[static_cast<std::size_t>(member)];
  };
  std::vector<int> members;
  for (int member = 0; member < size_; ++member) {
    if (packet_of(member).color == color) members.push_back(member);
  }
  std::ranges::stable_sort(members, {}, [&](int member) { return packet_of(member).key; });
  auto group = std::make_shared<MpiGroup>();
  for (const int member : members) {
    group->world_ranks.push_back(world_rank_of(member));
    group->members.insert(world_rank_of(member));
  }
  if (members.size() > 1) {
    endpoint.take_group_id();
    const int leader = members.front();
    group->index =
        MpiGroup::index_of(packet_of(leader).groups_led, world_rank_of(leader), endpoint.size());
    if (leader == rank_) endpoint.count_group_led();
    group->native = native_comm(endpoint, *group);
  }
  leave(call);
  const auto own = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
  return std::unique_ptr<Communicator>(new MpiCommunicator(world_, std::move(group), own));
}

std::shared_ptr<MpiMoving> MpiCommunicator::queue(bool is_send, int peer, Buffer data,
                                                  const CallInfo& info, bool must_be_taken) {
  MpiEndpoint& endpoint = world_->endpoint;
  endpoint.poll();
  if (endpoint.is_aborted()) endpoint.throw_abort();
  return world_->transfers.add(*group_, rank_, peer,
                               {.op = is_send ? CollectiveOp::kSend : CollectiveOp::kRecv,
                                .purpose = info.purpose,
                                .axis = info.axis,
                                .dtype = data.dtype,
                                .root = world_rank_of(peer),
                                .count = data.count},
                               data, must_be_taken);
}

Work MpiCommunicator::send(ConstBuffer data, int to, const CallInfo& info) {
  check_data(data, "send");
  check_peer(to, size_, "send");
  if (to == rank_)
    throw CommError(
        fmt::format("send from rank {} to itself would wait forever; use send_recv", rank_));
  world_->transfers.finish(queue(true, to, as_buffer(data), info, /*must_be_taken=*/true));
  return {};
}

Work MpiCommunicator::recv(Buffer data, int from, const CallInfo& info) {
  check_data(data, "recv");
  check_peer(from, size_, "recv");
  if (from == rank_)
    throw CommError(
        fmt::format("recv by rank {} from itself would wait forever; use send_recv", rank_));
  world_->transfers.finish(queue(false, from, data, info, /*must_be_taken=*/false));
  return {};
}

Work MpiCommunicator::send_recv(std::span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers) {
    check_data(transfer.data, transfer.is_send ? "send_recv (send)" : "send_recv (recv)");
    check_peer(transfer.peer, size_, "send_recv");
  }
  send_to_itself(transfers, rank_);
  std::vector<std::shared_ptr<MpiMoving>> all;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer != rank_) {
      all.push_back(queue(transfer.is_send, transfer.peer, transfer.data, transfer.info, false));
    }
  }
  world_->endpoint.poll();
  std::erase_if(all, [](const auto& moving) { return moving->is_done; });
  if (all.empty()) return {};
  return Work([world = world_, all = std::move(all)] {
    for (const auto& moving : all) world->transfers.finish(moving);
  });
}

}  // namespace isoshard
