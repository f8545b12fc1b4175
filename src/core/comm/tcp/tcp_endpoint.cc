// SPDX-License-Identifier: Apache-2.0
/// Packets with the number of their world in front.
#include "core/comm/tcp/tcp_endpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include "core/base/error.h"

namespace isoshard {
namespace {

/// Of lanes: no group has this id.
constexpr std::uint64_t kLanes = kGroupOfOne - 1;
/// Data of NCCL move while nobody polls, but only a poll sees that they are there.
constexpr std::chrono::microseconds kPauseOfData{20};
constexpr std::chrono::microseconds kPause{1000};

}  // namespace

std::uint64_t TcpJob::open_world() {
  World& world = world_of(num_worlds_);
  world.is_open = true;
  return num_worlds_++;
}

void TcpJob::close_world(std::uint64_t world) noexcept {
  std::erase_if(worlds_, [&](const World& each) { return each.number == world; });
}

TcpJob::World& TcpJob::world_of(std::uint64_t number) {
  const auto found = std::ranges::find(worlds_, number, &World::number);
  return found != worlds_.end() ? *found : worlds_.emplace_back(World{.number = number});
}

void TcpJob::post(std::uint64_t world, int to, const std::vector<std::byte>& packet) {
  auto bytes = std::make_shared<std::vector<std::byte>>(sizeof world + packet.size());
  std::memcpy(bytes->data(), &world, sizeof world);
  std::memcpy(bytes->data() + sizeof world, packet.data(), packet.size());
  mesh_.post(to, bytes);
}

std::deque<std::pair<int, std::vector<std::byte>>> TcpJob::take(std::uint64_t world) {
  mesh_.poll([&](int from, std::span<const std::byte> bytes) {
    std::uint64_t number = 0;
    if (bytes.size() < sizeof number)
      throw InfrastructureError(
          "a packet between ranks must name its world; start the same "
          "program on every host");
    std::memcpy(&number, bytes.data(), sizeof number);
    const auto packet = bytes.subspan(sizeof number);
    const bool is_over =
        number < num_worlds_ && std::ranges::find(worlds_, number, &World::number) == worlds_.end();
    if (!is_over)
      world_of(number).inbox.emplace_back(from, std::vector(packet.begin(), packet.end()));
  });
  return std::exchange(world_of(world).inbox, {});
}

TcpEndpoint::TcpEndpoint(std::shared_ptr<TcpJob> job, ReductionOrder order,
                         const SharedAbort* shared_abort, std::byte* shared_journal)
    : ControlEndpoint(job->mesh().rank(), job->mesh().size(), order, shared_journal),
      job_(std::move(job)),
      world_(job_->open_world()),
      shared_abort_(shared_abort) {}

TcpEndpoint::~TcpEndpoint() {
  try {
    if (std::uncaught_exceptions() == 0) post_to_all(encode({.kind = PacketKind::kGoodbye}));
    job_->mesh().drain();
  } catch (...) {  // the others see that the connection closes
  }
  job_->close_world(world_);
}

void TcpEndpoint::post(int world_rank, const Bytes& packet) {
  job_->post(world_, world_rank, *packet);
}

void TcpEndpoint::take_all_packets() {
  for (const auto& [from, bytes] : job_->take(world_)) {
    Packet packet = decode(bytes);
    if (packet.kind == PacketKind::kGoodbye) {
      left_.insert(from);
    } else {
      handle(std::move(packet), from);
    }
  }
  if (shared_abort_ != nullptr && shared_abort_->is_aborted.load(std::memory_order_acquire) == 1)
    take_abort(AbortKind::kFailure, shared_abort_->reason);
}

void TcpEndpoint::flush() {
  job_->mesh().flush();
}

void TcpEndpoint::pause(bool moves_data) noexcept {
  job_->mesh().wait(moves_data ? kPauseOfData : kPause);
}

// The others see that this process is gone, as their connection to it closes.
void TcpEndpoint::end_in_abort() noexcept {}

std::string TcpEndpoint::why_gone(const RankSet& ranks, bool moves_data) {
  for (int other = 0; other < size(); ++other) {
    if (other == rank() || !ranks.contains(other)) continue;
    if (left_.contains(other)) {
      // what it had to move it has handed over
      if (!moves_data) return fmt::format("rank {} has left the world", other);
    } else if (job_->mesh().is_gone(other)) {
      return fmt::format("rank {} is lost: its process ended, or the connection to it broke",
                         other);
    }
  }
  return {};
}

std::uint64_t TcpEndpoint::gather_journals(std::uint64_t word) {
  const std::size_t lane = journal().num_lane_words();
  std::vector<std::uint64_t> words(lane + 1);
  journal().copy_lane(rank(), std::span(words).first(lane));
  words.back() = word;
  Packet own{.kind = PacketKind::kLane};
  own.entry.call.group_id = kLanes;
  own.data.resize(words.size() * sizeof(words[0]));
  std::memcpy(own.data.data(), words.data(), own.data.size());
  post_to_all(encode(own));
  for (int other = 0; other < size(); ++other) {
    if (other == rank()) continue;
    while (waiting_packet(kLanes, other) == nullptr) {
      const bool is_gone = job_->mesh().is_gone(other);
      poll();
      if (waiting_packet(kLanes, other) != nullptr) break;
      if (is_gone) throw CommError(fmt::format("rank {} ended and left no journal", other));
      pause(/*moves_data=*/false);
    }
    const Packet theirs = take_packet(kLanes, other);
    if (theirs.data.size() != own.data.size()) continue;
    std::memcpy(words.data(), theirs.data.data(), theirs.data.size());
    journal().set_lane(other, std::span(words).first(lane));
    word = std::max(word, words.back());
  }
  return word;
}

}  // namespace isoshard
