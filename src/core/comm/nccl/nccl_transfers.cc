// SPDX-License-Identifier: Apache-2.0
/// Headers and answers through the inbox, bytes through a communicator of NCCL for each channel.
#include "core/comm/nccl/nccl_transfers.h"

#include <cstring>

#include "core/comm/buffers.h"
#include "core/comm/mismatch.h"
#include "core/comm/nccl/nccl_rank.h"

namespace isoshard {
namespace {

std::size_t bytes_of(const Buffer& data) {
  return bytes_of(data.count, data.dtype);
}

bool is_on_host(const Buffer& data) {
  return data.device.kind == Device::Kind::kCpu;
}

}  // namespace

NcclTransfers::~NcclTransfers() {
  GpuApi& api = rank_->api();
  for (auto& [key, channel] : channels_) {
    for (const auto& moving : channel.queue) {
      if (moving->place != nullptr) api.free(moving->place);
      if (moving->done != nullptr) api.destroy_event(moving->done);
    }
    if (channel.ready != nullptr) api.destroy_event(channel.ready);
    if (channel.stream != nullptr) api.destroy_stream(channel.stream);
  }
}

std::shared_ptr<NcclMoving> NcclTransfers::add(const CommGroup& group, int own_rank, int peer,
                                               CollectiveCall call, Buffer data) {
  TcpEndpoint& endpoint = rank_->endpoint();
  const bool is_send = call.op == CollectiveOp::kSend;
  const std::uint64_t id =
      is_send ? group.channel_id(own_rank, peer) : group.channel_id(peer, own_rank);
  auto [found, is_new] = channels_.try_emplace({id, is_send});
  Channel& channel = found->second;
  if (is_new) {
    endpoint.take_group_id();
    channel.id = id;
    channel.peer = group.world_ranks[static_cast<std::size_t>(peer)];
    channel.is_send = is_send;
  }
  call.group_id = id;
  call.group_sequence = ++channel.num_messages;
  endpoint.journal().promise(endpoint.rank(), call);
  auto moving = std::make_shared<NcclMoving>(NcclMoving{.call = call, .data = data});
  if (is_send) post(channel, *moving);
  channel.queue.push_back(moving);
  return moving;
}

// The sender's first header carries what NCCL needs to connect both.
void NcclTransfers::post(Channel& channel, const NcclMoving& moving) {
  Packet packet{.kind = channel.is_send ? PacketKind::kTransfer : PacketKind::kGo};
  packet.entry.call = moving.call;
  if (channel.is_send && !channel.has_nccl_id) {
    channel.nccl_id = rank_->api().make_id();
    channel.has_nccl_id = true;
    packet.data.assign(channel.nccl_id.begin(), channel.nccl_id.end());
  }
  rank_->endpoint().post(channel.peer, encode(packet));
}

void NcclTransfers::enter(NcclMoving& moving) {
  if (moving.sequence != 0) return;
  JournalEntry entry;
  entry.call = moving.call;
  entry.group_size = 2;
  entry.group_members = {rank_->endpoint().rank(), moving.call.root};
  moving.sequence = rank_->endpoint().journal().enter(rank_->endpoint().rank(), entry);
}

void NcclTransfers::advance() {
  if (rank_->endpoint().is_aborted()) return;
  for (auto& [key, channel] : channels_) advance(channel);
}

void NcclTransfers::advance(Channel& channel) {
  for (const auto& moving : channel.queue) {
    // one after the other: a communicator takes no call while it is under way with the last one
    if (!advance(channel, *moving)) break;
  }
  while (!channel.queue.empty() && channel.queue.front()->phase == NcclMoving::Phase::kDone)
    channel.queue.pop_front();
}

// Whether the next message may begin.
bool NcclTransfers::advance(Channel& channel, NcclMoving& moving) {
  using Phase = NcclMoving::Phase;
  if (moving.phase == Phase::kWaiting) {
    if (!meet_other_side(channel, moving)) return false;
    if (channel.comm == nullptr) connect(channel);
    moving.phase = Phase::kConnecting;
  }
  if (moving.phase == Phase::kConnecting) {
    if (!rank_->is_ready(channel.comm)) return false;
    launch(channel, moving);
    moving.phase = Phase::kLaunched;
  }
  if (moving.phase == Phase::kLaunched) {
    if (!rank_->is_ready(channel.comm)) return false;
    follow(channel, moving);
    moving.phase = Phase::kMoving;
  }
  if (moving.phase == Phase::kMoving && rank_->is_ready(channel.comm) &&
      rank_->api().is_done(moving.done)) {
    end(moving);
    moving.phase = Phase::kDone;
  }
  return true;
}

bool NcclTransfers::meet_other_side(Channel& channel, NcclMoving& moving) {
  TcpEndpoint& endpoint = rank_->endpoint();
  // of both directions with one id, which only a rank with itself would have
  if (endpoint.waiting_packet(channel.id, channel.peer) == nullptr) return false;
  const Packet packet = endpoint.take_packet(channel.id, channel.peer);
  if (!matches(packet.entry.call, moving.call)) {
    endpoint.fail(describe_mismatch_of_transfer({channel.peer, packet.entry.call},
                                                {endpoint.rank(), moving.call}));
  }
  if (channel.is_send) return true;
  if (packet.data.size() == channel.nccl_id.size()) {
    std::memcpy(channel.nccl_id.data(), packet.data.data(), packet.data.size());
    channel.has_nccl_id = true;
  }
  post(channel, moving);
  return true;
}

void NcclTransfers::connect(Channel& channel) {
  channel.comm = rank_->start_comm(channel.nccl_id, 2, channel.is_send ? 0 : 1);
  channel.stream = rank_->api().make_stream();
  channel.ready = rank_->api().make_event();
}

void NcclTransfers::launch(Channel& channel, NcclMoving& moving) {
  GpuApi& api = rank_->api();
  const Buffer& data = moving.data;
  const std::size_t bytes = bytes_of(data);
  if (is_on_host(data)) {
    if (bytes != 0) {
      moving.place = api.allocate(bytes);
      moving.staged = rank_->staging().take(bytes);
    }
    if (channel.is_send && bytes != 0) {
      copy_bytes(moving.staged, data.data, bytes);
      api.copy(moving.place, moving.staged, bytes, channel.stream);
    }
  } else {
    api.record(channel.ready, data.stream);
    api.wait_for(channel.ready, channel.stream);
  }
  std::byte* const place = is_on_host(data) ? moving.place : data.data;
  api.group_start();
  if (bytes != 0 && channel.is_send) api.send(place, bytes, 1, channel.comm, channel.stream);
  if (bytes != 0 && !channel.is_send) api.recv(place, bytes, 0, channel.comm, channel.stream);
  api.group_end();
}

// Only now: before, NCCL may not have put it into the stream.
void NcclTransfers::follow(Channel& channel, NcclMoving& moving) {
  GpuApi& api = rank_->api();
  const std::size_t bytes = bytes_of(moving.data);
  if (!channel.is_send && is_on_host(moving.data) && bytes != 0)
    api.copy(moving.staged, moving.place, bytes, channel.stream);
  moving.done = rank_->take_event();
  api.record(moving.done, channel.stream);
}

void NcclTransfers::end(NcclMoving& moving) {
  enter(moving);
  rank_->endpoint().journal().finish(rank_->endpoint().rank(), moving.sequence);
  if (moving.staged != nullptr) {
    if (moving.call.op == CollectiveOp::kRecv)
      copy_bytes(moving.data.data, moving.staged, bytes_of(moving.data));
    rank_->api().free(std::exchange(moving.place, nullptr));
    rank_->staging().give_back(std::exchange(moving.staged, nullptr));
  }
  rank_->give_back(std::exchange(moving.done, nullptr));
}

void NcclTransfers::finish(const std::shared_ptr<NcclMoving>& moving) {
  TcpEndpoint& endpoint = rank_->endpoint();
  endpoint.poll();
  if (moving->phase == NcclMoving::Phase::kDone) return;
  if (endpoint.is_aborted()) endpoint.throw_abort();
  enter(*moving);
  const RankSet members = {endpoint.rank(), moving->call.root};
  // until the other side has come, nothing moves; what it then does is seen in a poll
  endpoint.wait_until([&] { return moving->phase != NcclMoving::Phase::kWaiting; },
                      /*moves_data=*/false, &members);
  endpoint.wait_until([&] { return moving->phase == NcclMoving::Phase::kDone; },
                      /*moves_data=*/true, &members);
}

}  // namespace isoshard
