// SPDX-License-Identifier: Apache-2.0
/// Headers through the inbox, bytes through requests.
#include "core/comm/mpi/mpi_transfers.h"

#include <algorithm>
#include <array>

#include "core/comm/buffers.h"
#include "core/comm/mismatch.h"

namespace isoshard {
namespace {

/// A message of this size travels with its header.
constexpr std::size_t kSmallTransferBytes = 2048;

std::size_t bytes_of(const Buffer& data) {
  return bytes_of(data.count, data.dtype);
}

}  // namespace

std::shared_ptr<MpiMoving> MpiTransfers::add(const CommGroup& group, int own_rank, int peer,
                                             CollectiveCall call, Buffer data, bool must_be_taken) {
  const bool is_send = call.op == CollectiveOp::kSend;
  const std::uint64_t id =
      is_send ? group.channel_id(own_rank, peer) : group.channel_id(peer, own_rank);
  auto [found, is_new] = channels_.try_emplace({id, is_send});
  MpiChannel& channel = found->second;
  if (is_new) {
    endpoint_->take_group_id();
    channel.id = id;
    channel.peer = group.world_ranks[static_cast<std::size_t>(peer)];
    channel.tag = MpiTags::of_transfers(group);
    channel.is_send = is_send;
  }
  call.group_id = id;
  call.group_sequence = ++channel.num_messages;
  endpoint_->journal().promise(endpoint_->rank(), call);
  auto moving = std::make_shared<MpiMoving>(*endpoint_, call, data);
  if (is_send) start_sending(channel, *moving, must_be_taken);
  channel.queue.push_back(moving);
  return moving;
}

void MpiTransfers::start_sending(MpiChannel& channel, MpiMoving& moving, bool must_be_taken) {
  Packet header{.kind = PacketKind::kTransfer};
  header.entry.call = moving.call;
  const std::size_t bytes = bytes_of(moving.data);
  const bool is_small = bytes <= kSmallTransferBytes && !must_be_taken;
  // says that the bytes follow; an empty message that must be taken still has a message of its own
  header.color = is_small ? 0 : 1;
  if (is_small) header.data.assign(moving.data.data, moving.data.data + bytes);
  endpoint_->post(channel.peer, encode(header));
  moving.is_under_way = true;
  if (is_small) return;
  if (bytes != 0) {
    endpoint_->start_send({channel.peer, moving.data.data, bytes}, channel.tag, must_be_taken,
                          moving.in_flight);
  } else {
    endpoint_->start_empty(channel.peer, channel.tag, /*is_send=*/true, moving.in_flight);
  }
}

void MpiTransfers::start_receiving(MpiChannel& channel, MpiMoving& moving) {
  const Packet header = endpoint_->take_packet(channel.id, channel.peer);
  if (!matches(header.entry.call, moving.call)) {
    endpoint_->fail(describe_mismatch_of_transfer({channel.peer, header.entry.call},
                                                  {endpoint_->rank(), moving.call}));
  }
  moving.is_under_way = true;
  const std::size_t bytes = bytes_of(moving.data);
  if (header.color == 0) {
    copy_bytes(moving.data.data, header.data.data(), bytes);
  } else if (bytes != 0) {
    endpoint_->start_receive({channel.peer, moving.data.data, bytes}, channel.tag,
                             moving.in_flight);
  } else {
    endpoint_->start_empty(channel.peer, channel.tag, /*is_send=*/false, moving.in_flight);
  }
}

void MpiTransfers::enter(MpiMoving& moving) {
  if (moving.sequence != 0) return;
  JournalEntry entry;
  entry.call = moving.call;
  entry.group_size = 2;
  entry.group_members = {endpoint_->rank(), moving.call.root};
  moving.sequence = endpoint_->journal().enter(endpoint_->rank(), entry);
}

void MpiTransfers::advance() {
  if (endpoint_->is_aborted()) return;
  for (auto& [key, channel] : channels_) advance(channel);
}

void MpiTransfers::advance(MpiChannel& channel) {
  for (const auto& moving : channel.queue) {
    if (!moving->is_under_way) {
      if (endpoint_->waiting_packet(channel.id, channel.peer) == nullptr) break;
      start_receiving(channel, *moving);
    }
    if (moving->is_done || !MpiEndpoint::are_done(moving->in_flight)) continue;
    // An aborted rank takes everything, and says so first: that is no receive.
    if (endpoint_->is_aborted_by_now()) return;
    moving->is_done = true;
    enter(*moving);
    endpoint_->journal().finish(endpoint_->rank(), moving->sequence);
  }
  while (!channel.queue.empty() && channel.queue.front()->is_done) channel.queue.pop_front();
}

void MpiTransfers::finish(std::span<const std::shared_ptr<MpiMoving>> all) {
  try {
    for (const auto& moving : all) finish(*moving);
  } catch (...) {
    take_back(all);
    throw;
  }
}

void MpiTransfers::finish(MpiMoving& moving) {
  advance();
  if (moving.is_done) return;
  if (endpoint_->is_aborted()) endpoint_->throw_abort();
  enter(moving);
  endpoint_->wait_until([&] { return moving.is_done; }, moving.is_under_way);
}

void MpiTransfers::take_back(std::span<const std::shared_ptr<MpiMoving>> all) noexcept {
  for (const auto& moving : all) endpoint_->take_back(moving->in_flight);
}

}  // namespace isoshard
