// SPDX-License-Identifier: Apache-2.0
/// send, recv and grouped calls, through the channels of region_channel.h: a send that meets no
/// recv, or one of other dtype or count, is found and reported as for collectives.
#include <fmt/format.h>

#include <utility>

#include "core/base/error.h"
#include "core/comm/blocks.h"
#include "core/comm/region/region_communicator.h"

namespace isoshard {
namespace {

Buffer as_buffer(const ConstBuffer& data) {
  // NOLINT: a send only reads it
  return {const_cast<std::byte*>(data.data), data.count, data.dtype, data.device, data.stream};
}

}  // namespace

struct RegionCommunicator::Queued {
  ChannelEnd* end = nullptr;
  std::shared_ptr<Moving> moving;
};

ChannelEnd& RegionCommunicator::channel(int peer, bool is_send) {
  ChannelEnd*& end = ends_[{peer, is_send}];
  if (end == nullptr) {
    try {
      GroupBlock& block = is_send ? region_->channel_of(*group_, rank_, peer)
                                  : region_->channel_of(*group_, peer, rank_);
      end = &channels_->add(block, is_send);
    } catch (const InfrastructureError& error) {
      abort(fmt::format("rank {}: {}", world_rank_, error.what()));
      throw;
    }
  }
  return *end;
}

RegionCommunicator::Queued RegionCommunicator::queue(bool is_send, int peer, Buffer data,
                                                     const CallInfo& info, bool must_be_taken) {
  if (region_->is_aborted()) region_->throw_abort();
  ChannelEnd& end = channel(peer, is_send);
  return {&end, end.add({.op = is_send ? CollectiveOp::kSend : CollectiveOp::kRecv,
                         .purpose = info.purpose,
                         .axis = info.axis,
                         .dtype = data.dtype,
                         .root = world_rank_of(peer),
                         .count = data.count},
                        data, must_be_taken)};
}

Work RegionCommunicator::send(ConstBuffer data, int to, const CallInfo& info) {
  check_data(data, "send");
  check_peer(to, size_, "send");
  if (to == rank_)
    throw CommError(
        fmt::format("send from rank {} to itself would wait forever; use send_recv", rank_));
  const Queued queued = queue(true, to, as_buffer(data), info, /*must_be_taken=*/true);
  channels_->finish(*queued.end, *queued.moving);
  return {};
}

Work RegionCommunicator::recv(Buffer data, int from, const CallInfo& info) {
  check_data(data, "recv");
  check_peer(from, size_, "recv");
  if (from == rank_)
    throw CommError(
        fmt::format("recv by rank {} from itself would wait forever; use send_recv", rank_));
  const Queued queued = queue(false, from, data, info);
  channels_->finish(*queued.end, *queued.moving);
  return {};
}

Work RegionCommunicator::send_recv(std::span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers) {
    check_data(transfer.data, transfer.is_send ? "send_recv (send)" : "send_recv (recv)");
    check_peer(transfer.peer, size_, "send_recv");
  }
  send_to_itself(transfers, rank_);
  std::vector<Queued> all;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer != rank_)
      all.push_back(queue(transfer.is_send, transfer.peer, transfer.data, transfer.info));
  }
  channels_->advance();
  std::erase_if(all, [](const Queued& queued) { return queued.moving->is_done; });
  if (all.empty()) return {};
  return Work([channels = channels_, all = std::move(all)] {
    for (const Queued& queued : all) channels->finish(*queued.end, *queued.moving);
  });
}

}  // namespace isoshard
