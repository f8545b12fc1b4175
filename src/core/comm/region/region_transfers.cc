// SPDX-License-Identifier: Apache-2.0
/// send, recv and grouped calls.
///
/// Two ranks that exchange data get a group block of their own, a *pair*, with windows,
/// announcements and journal entries like any group: so a send that meets no recv, or one of other
/// dtype or count, is found and reported as for collectives. In a grouped call every rank makes its
/// transfers in one order that all ranks know: by pair, then by direction. The first transfer in
/// that order that is not done has both its ranks waiting at it, hence there is always one that can
/// go on.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "core/base/error.h"
#include "core/comm/region/region_buffers.h"
#include "core/comm/region/region_communicator.h"

namespace isoshard {
namespace {

Buffer as_buffer(const ConstBuffer& data) {
  // NOLINT: a send only reads it
  return {const_cast<std::byte*>(data.data), data.count, data.dtype, data.device, data.stream};
}

void check_data(const ConstBuffer& data, const char* op) {
  check_on_host(data, op, "data");
  if (data.count < 0 || (data.count > 0 && data.data == nullptr)) {
    throw ShapeError(fmt::format(
        "{}: the data must have a count of at least 0 and an address, got {} elements at {}", op,
        data.count, static_cast<const void*>(data.data)));
  }
}

}  // namespace

void RegionCommunicator::check_peer(int peer, const char* op) const {
  if (peer < 0 || peer >= size_)
    throw CommError(fmt::format("{}: the rank of the other side must be from 0 to {}, got {}", op,
                                size_ - 1, peer));
}

RegionCommunicator& RegionCommunicator::pair_with(int peer) {
  std::unique_ptr<RegionCommunicator>& pair = pairs_[peer];
  if (pair == nullptr) {
    try {
      GroupBlock& block = region_->pair_of(*group_, std::min(rank_, peer), std::max(rank_, peer));
      pair.reset(new RegionCommunicator(*region_, world_rank_, &block, rank_ < peer ? 0 : 1));
    } catch (const InfrastructureError& error) {
      abort(fmt::format("rank {}: {}", world_rank_, error.what()));
      throw;
    }
  }
  return *pair;
}

Work RegionCommunicator::send(ConstBuffer data, int to, const CallInfo& info) {
  check_data(data, "send");
  check_peer(to, "send");
  if (to == rank_)
    throw CommError(
        fmt::format("send from rank {} to itself would wait forever; use send_recv", rank_));
  pair_with(to).transfer(true, as_buffer(data), info);
  return {};
}

Work RegionCommunicator::recv(Buffer data, int from, const CallInfo& info) {
  check_data(data, "recv");
  check_peer(from, "recv");
  if (from == rank_)
    throw CommError(
        fmt::format("recv by rank {} from itself would wait forever; use send_recv", rank_));
  pair_with(from).transfer(false, data, info);
  return {};
}

// On the communicator of a pair.
void RegionCommunicator::transfer(bool is_send, Buffer data, const CallInfo& info) {
  const int peer = 1 - rank_;
  Call call = enter({.op = is_send ? CollectiveOp::kSend : CollectiveOp::kRecv,
                     .dtype = data.dtype,
                     .root = world_rank_of(peer),
                     .count = data.count},
                    info);
  const std::size_t total = static_cast<std::size_t>(data.count) * size_of(data.dtype);
  std::size_t begin = 0;
  do {
    const std::size_t bytes = std::min(kBufferBytes, total - begin);
    const std::uint64_t chunk = num_chunks_++;
    if (is_send && bytes != 0) std::memcpy(own_buffer(chunk, bytes), data.data + begin, bytes);
    meet_others(call);
    if (!is_send && bytes != 0) std::memcpy(data.data + begin, buffer(peer, chunk), bytes);
    begin += bytes;
  } while (begin < total);
  leave(call);
}

Work RegionCommunicator::send_recv(std::span<const Transfer> transfers) {
  std::vector<const Transfer*> order;
  for (const Transfer& transfer : transfers) {
    check_data(transfer.data, transfer.is_send ? "send_recv (send)" : "send_recv (recv)");
    check_peer(transfer.peer, "send_recv");
    if (transfer.peer != rank_) order.push_back(&transfer);
  }
  send_to_itself(transfers);
  // Pairs with the same (rank + peer) mod size share no rank, so they exchange at the same time.
  std::ranges::stable_sort(order, {}, [this](const Transfer* transfer) {
    const bool is_from_higher = transfer->is_send == (rank_ > transfer->peer);
    return std::tuple((rank_ + transfer->peer) % size_, std::min(rank_, transfer->peer),
                      is_from_higher);
  });
  for (const Transfer* transfer : order)
    pair_with(transfer->peer).transfer(transfer->is_send, transfer->data, transfer->info);
  return {};
}

void RegionCommunicator::send_to_itself(std::span<const Transfer> transfers) {
  std::vector<const Transfer*> sends;
  std::vector<const Transfer*> recvs;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer == rank_) (transfer.is_send ? sends : recvs).push_back(&transfer);
  }
  if (sends.size() != recvs.size()) {
    throw CommError(
        fmt::format("send_recv: rank {} must receive from itself as often as it sends to itself, "
                    "got {} sends and {} recvs",
                    rank_, sends.size(), recvs.size()));
  }
  for (std::size_t i = 0; i < sends.size(); ++i) {
    const Buffer& from = sends[i]->data;
    const Buffer& to = recvs[i]->data;
    if (from.dtype != to.dtype || from.count != to.count) {
      throw CommError(
          fmt::format("send_recv: what rank {} sends to itself must match what it receives, got {} "
                      "x {} and {} x {}",
                      rank_, name_of(from.dtype), from.count, name_of(to.dtype), to.count));
    }
    if (from.count != 0)
      std::memmove(to.data, from.data, static_cast<std::size_t>(from.count) * size_of(from.dtype));
  }
}

}  // namespace isoshard
