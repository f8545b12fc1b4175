// SPDX-License-Identifier: Apache-2.0
/// Entry of every call; split, barrier, transfers.
#include "core/comm/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <vector>

#include "core/base/error.h"
#include "core/comm/blocks.h"
#include "core/comm/buffers.h"

namespace isoshard {
namespace {

Buffer as_buffer(const ConstBuffer& data) {
  // NOLINT: a send only reads it
  return {const_cast<std::byte*>(data.data), data.count, data.dtype, data.device, data.stream};
}

void check_one_device(const Buffer& from, const Buffer& to) {
  if (from.device == to.device) return;
  throw UsageError(fmt::format(
      "send_recv: what a rank sends to itself must be where it receives it, got {} and {}",
      name_of(from.device), name_of(to.device)));
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclRank> world)
    : NcclCommunicator(world, GroupCalls(world->endpoint())) {}

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclRank> world, GroupCalls calls)
    : world_(std::move(world)), calls_(std::move(calls)) {}

void NcclCommunicator::check(const ConstBuffer& buffer, const char* op, const char* name) const {
  check_data_anywhere(buffer, op);
  if (buffer.device.kind == Device::Kind::kCpu) return check_on_host(buffer, op, name);
  if (buffer.device.index == world_->device()) return;
  throw UsageError(
      fmt::format("{}: {} must be on the rank's device cuda:{} or in host memory, got "
                  "{}; copy it there first",
                  op, name, world_->device(), name_of(buffer.device)));
}

NcclLaunch NcclCommunicator::meet(Packet own, const CallInfo& info) {
  if (group_.comm == nullptr && rank() == 0 && size() > 1) {
    const NcclId id = world_->api().make_id();
    own.data.assign(id.begin(), id.end());
  }
  return {world_, calls_, group_, calls_.meet(std::move(own), info)};
}

void NcclCommunicator::barrier(const CallInfo& info) {
  world_->guarded(
      [&] { calls_.leave(calls_.meet(packet_of({.op = CollectiveOp::kBarrier}), info)); });
}

std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key) {
  return world_->guarded([&] {
    return std::unique_ptr<Communicator>(new NcclCommunicator(world_, calls_.split(color, key)));
  });
}

std::shared_ptr<NcclMoving> NcclCommunicator::queue(bool is_send, int peer, Buffer data,
                                                    const CallInfo& info) {
  TcpEndpoint& endpoint = world_->endpoint();
  endpoint.poll();
  if (endpoint.is_aborted()) endpoint.throw_abort();
  return world_->transfers().add(calls_.group(), rank(), peer,
                                 {.op = is_send ? CollectiveOp::kSend : CollectiveOp::kRecv,
                                  .purpose = info.purpose,
                                  .axis = info.axis,
                                  .dtype = data.dtype,
                                  .root = world_rank_of(peer),
                                  .count = data.count},
                                 data);
}

Work NcclCommunicator::send(ConstBuffer data, int to, const CallInfo& info) {
  check(data, "send", "data");
  check_peer(to, size(), "send");
  if (to == rank())
    throw CommError(
        fmt::format("send from rank {} to itself would wait forever; use send_recv", rank()));
  world_->guarded([&] { world_->transfers().finish(queue(true, to, as_buffer(data), info)); });
  return {};
}

Work NcclCommunicator::recv(Buffer data, int from, const CallInfo& info) {
  check(data, "recv", "data");
  check_peer(from, size(), "recv");
  if (from == rank())
    throw CommError(
        fmt::format("recv by rank {} from itself would wait forever; use send_recv", rank()));
  world_->guarded([&] { world_->transfers().finish(queue(false, from, data, info)); });
  return {};
}

Work NcclCommunicator::send_recv(std::span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers) {
    check(transfer.data, transfer.is_send ? "send_recv (send)" : "send_recv (recv)", "data");
    check_peer(transfer.peer, size(), "send_recv");
  }
  const auto to_itself = pairs_to_itself(transfers, rank());
  return world_->guarded([&] {
    std::vector<std::shared_ptr<NcclMoving>> all;
    for (const Transfer& transfer : transfers) {
      if (transfer.peer != rank())
        all.push_back(queue(transfer.is_send, transfer.peer, transfer.data, transfer.info));
    }
    world_->endpoint().poll();
    GpuEvent copied = nullptr;
    for (const auto& [from, to] : to_itself) {
      const std::size_t bytes = bytes_of(from.count, from.dtype);
      const bool is_of_host =
          from.device.kind == Device::Kind::kCpu && to.device.kind == Device::Kind::kCpu;
      if (is_of_host) copy_bytes(to.data, from.data, bytes);
      if (bytes == 0 || is_of_host) continue;
      check_one_device(from, to);
      GpuApi& api = world_->api();
      if (copied == nullptr) copied = world_->take_event();
      for (const Buffer& side : {from, to}) {
        if (side.device.kind == Device::Kind::kCpu) continue;
        api.record(copied, side.stream);
        api.wait_for(copied, world_->stream());
      }
      api.copy(to.data, from.data, bytes, world_->stream());
    }
    if (copied != nullptr) world_->api().record(copied, world_->stream());
    if (all.empty() && copied == nullptr) return Work();
    return Work([world = world_, all = std::move(all), copied] {
      world->guarded([&] {
        for (const auto& moving : all) world->transfers().finish(moving);
        if (copied == nullptr) return;
        world->until_done(copied, nullptr, {});
        world->give_back(copied);
      });
    });
  });
}

}  // namespace isoshard
