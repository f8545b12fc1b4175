// SPDX-License-Identifier: Apache-2.0
/// Events before and after, and copies of what the host has.
#include "core/comm/nccl/nccl_launch.h"

#include <algorithm>
#include <cstring>

#include "core/comm/buffers.h"

namespace isoshard {

NcclLaunch::NcclLaunch(std::shared_ptr<NcclRank> rank, const GroupCalls& calls, NcclGroup& group,
                       MetCall call)
    : rank_(std::move(rank)),
      members_(calls.group().members),
      group_(&group),
      call_(std::move(call)) {
  rank_->scratch().begin_call();
  if (calls.size() == 1) return;
  if (group_->comm == nullptr) {
    NcclId id;
    const std::vector<std::byte>& of_leader = call_.packets.front().data;
    std::memcpy(id.data(), of_leader.data(), std::min(id.size(), of_leader.size()));
    group_->comm = rank_->start_comm(id, calls.size(), calls.rank());
  }
  rank_->until_ready(group_->comm, members_);
}

void NcclLaunch::follow(const ConstBuffer& buffer) {
  if (buffer.device.kind == Device::Kind::kCpu ||
      std::ranges::find(followed_, buffer.stream) != followed_.end())
    return;
  followed_.push_back(buffer.stream);
  if (event_ == nullptr) event_ = rank_->take_event();
  api().record(event_, buffer.stream);
  api().wait_for(event_, rank_->stream());
}

const std::byte* NcclLaunch::input(const ConstBuffer& buffer) {
  follow(buffer);
  if (buffer.device.kind != Device::Kind::kCpu || buffer.count == 0) return buffer.data;
  const std::size_t bytes = bytes_of(buffer.count, buffer.dtype);
  std::byte* const place = scratch(bytes);
  bring(place, buffer.data, bytes);
  return place;
}

void NcclLaunch::bring(std::byte* place, const std::byte* host, std::size_t bytes) {
  std::byte* const staged = staged_.emplace_back(rank_->staging().take(bytes));
  copy_bytes(staged, host, bytes);
  copy(place, staged, bytes);
}

std::byte* NcclLaunch::output(const Buffer& buffer, bool has_input) {
  follow(buffer);
  if (buffer.device.kind != Device::Kind::kCpu || buffer.count == 0) return buffer.data;
  const std::size_t bytes = bytes_of(buffer.count, buffer.dtype);
  std::byte* const place = scratch(bytes);
  if (has_input) bring(place, buffer.data, bytes);
  results_.emplace_back(buffer, place);
  return place;
}

void NcclLaunch::at_once(const std::function<void()>& calls) {
  api().group_start();
  calls();
  api().group_end();
  rank_->until_ready(comm(), members_);
}

void NcclLaunch::exchange(const std::vector<NcclPiece>& receives,
                          const std::vector<NcclPiece>& sends) {
  at_once([&] {
    for (const NcclPiece& piece : sends) {
      if (piece.bytes != 0) api().send(piece.data, piece.bytes, piece.rank, comm(), stream());
    }
    for (const NcclPiece& piece : receives) {
      if (piece.bytes != 0) api().recv(piece.data, piece.bytes, piece.rank, comm(), stream());
    }
  });
}

void NcclLaunch::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0 && to != from) api().copy(to, from, bytes, stream());
}

Work NcclLaunch::end() {
  for (auto& [buffer, place] : results_) {
    const std::size_t bytes = bytes_of(buffer.count, buffer.dtype);
    std::byte* const staged = staged_.emplace_back(rank_->staging().take(bytes));
    copy(staged, place, bytes);
    place = staged;
  }
  const GpuEvent done = rank_->take_event();
  api().record(done, stream());
  if (event_ != nullptr) rank_->give_back(std::exchange(event_, nullptr));
  return Work([rank = rank_, members = members_, comm = comm(), done, sequence = call_.sequence,
               results = std::move(results_), staged = std::move(staged_)] {
    rank->guarded([&] { rank->until_done(done, comm, members); });
    rank->give_back(done);
    for (const auto& [buffer, memory] : results)
      copy_bytes(buffer.data, memory, bytes_of(buffer.count, buffer.dtype));
    for (std::byte* memory : staged) rank->staging().give_back(memory);
    rank->endpoint().journal().finish(rank->endpoint().rank(), sequence);
  });
}

}  // namespace isoshard
