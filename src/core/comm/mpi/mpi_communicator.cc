// SPDX-License-Identifier: Apache-2.0
/// Entry, comparison and end of every call; split, barrier, transfers.
#include "core/comm/mpi/mpi_communicator.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/comm/blocks.h"
#include "core/comm/mpi/mpi_job.h"

namespace isoshard {
namespace {

Buffer as_buffer(const ConstBuffer& data) {
  // NOLINT: a send only reads it
  return {const_cast<std::byte*>(data.data), data.count, data.dtype, data.device, data.stream};
}

/// Order native reduces in MPI's own communicators.
/// Ranks    collective over the group.
MPI_Comm native_comm(const MpiEndpoint& endpoint, const CommGroup& made) {
  if (endpoint.reduction_order() != ReductionOrder::kNative || made.world_ranks.size() == 1)
    return MPI_COMM_NULL;
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(endpoint.data_comm(), &world), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(world, static_cast<int>(made.world_ranks.size()),
                           made.world_ranks.data(), &members),
            "MPI_Group_incl");
  check_mpi(
      MPI_Comm_create_group(endpoint.data_comm(), members, MpiTags::of_collectives(made), &comm),
      "MPI_Comm_create_group");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  return comm;
}

}  // namespace

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiRank> world)
    : MpiCommunicator(world, GroupCalls(world->endpoint)) {}

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiRank> world, GroupCalls calls)
    : world_(std::move(world)),
      calls_(std::move(calls)),
      native_(native_comm(world_->endpoint, calls_.group())),
      rank_(calls_.rank()),
      size_(calls_.size()) {}

void MpiCommunicator::abort(std::string_view reason) noexcept {
  world_->endpoint.abort(MpiEndpoint::AbortKind::kFailure, reason);
}

void MpiCommunicator::exchange(std::span<const Piece> receives, std::span<const Piece> sends) {
  InFlight in_flight(world_->endpoint);
  const int tag = MpiTags::of_collectives(calls_.group());
  for (const Piece& piece : receives) world_->endpoint.start_receive(piece, tag, in_flight);
  for (const Piece& piece : sends)
    world_->endpoint.start_send(piece, tag, /*must_be_taken=*/false, in_flight);
  world_->endpoint.wait_until([&] { return MpiEndpoint::are_done(in_flight); },
                              /*moves_data=*/true);
}

void MpiCommunicator::barrier(const CallInfo& info) {
  calls_.leave(calls_.meet(packet_of({.op = CollectiveOp::kBarrier}), info));
}

std::unique_ptr<Communicator> MpiCommunicator::split(int color, int key) {
  return std::unique_ptr<Communicator>(new MpiCommunicator(world_, calls_.split(color, key)));
}

std::shared_ptr<MpiMoving> MpiCommunicator::queue(bool is_send, int peer, Buffer data,
                                                  const CallInfo& info, bool must_be_taken) {
  MpiEndpoint& endpoint = world_->endpoint;
  endpoint.poll();
  if (endpoint.is_aborted()) endpoint.throw_abort();
  return world_->transfers.add(calls_.group(), rank_, peer,
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
  const std::vector one = {queue(true, to, as_buffer(data), info, /*must_be_taken=*/true)};
  world_->transfers.finish(one);
  return {};
}

Work MpiCommunicator::recv(Buffer data, int from, const CallInfo& info) {
  check_data(data, "recv");
  check_peer(from, size_, "recv");
  if (from == rank_)
    throw CommError(
        fmt::format("recv by rank {} from itself would wait forever; use send_recv", rank_));
  const std::vector one = {queue(false, from, data, info, /*must_be_taken=*/false)};
  world_->transfers.finish(one);
  return {};
}

Work MpiCommunicator::send_recv(std::span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers) {
    check_data(transfer.data, transfer.is_send ? "send_recv (send)" : "send_recv (recv)");
    check_peer(transfer.peer, size_, "send_recv");
  }
  send_to_itself(transfers, rank_);
  std::vector<std::shared_ptr<MpiMoving>> all;
  try {
    for (const Transfer& transfer : transfers) {
      if (transfer.peer != rank_) {
        all.push_back(queue(transfer.is_send, transfer.peer, transfer.data, transfer.info, false));
      }
    }
    world_->endpoint.poll();
  } catch (...) {
    world_->transfers.take_back(all);
    throw;
  }
  std::erase_if(all, [](const auto& moving) { return moving->is_done; });
  if (all.empty()) return {};
  return Work([world = world_, all = std::move(all)] { world->transfers.finish(all); });
}

}  // namespace isoshard
