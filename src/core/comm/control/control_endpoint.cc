// SPDX-License-Identifier: Apache-2.0
/// Polling: packets in, packets out, and the ways in which a wait ends.
#include "core/comm/control/control_endpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/base/error.h"

namespace isoshard {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t kLongestReason = 2000;
/// A rank that waits for so long tells all ranks what it waits for.
constexpr std::chrono::milliseconds kTellAfter{2};
/// A rank that has waited for so long, with nothing under way, gives its core away: for a hundredth
/// of the time that it has waited, so that who waits for seconds costs next to nothing.
constexpr std::chrono::milliseconds kRestAfter{5};
constexpr std::chrono::milliseconds kLongestRest{1};

std::size_t bytes_of_journal(int size) {
  // room to begin at a multiple of 64
  return Journal::bytes(size) + 64;
}

std::byte* aligned(std::byte* memory) {
  void* begin = memory;
  std::size_t space = 64 + 64;
  return static_cast<std::byte*>(std::align(64, 64, begin, space));
}

}  // namespace

ControlEndpoint::ControlEndpoint(int rank, int size, ReductionOrder order,
                                 std::byte* shared_journal)
    : rank_(rank),
      size_(size),
      order_(order),
      journal_memory_(2 * bytes_of_journal(size_)),
      has_shared_journal_(shared_journal != nullptr),
      journal_(has_shared_journal_ ? shared_journal : aligned(journal_memory_.data()), size_),
      waits_(aligned(journal_memory_.data() + bytes_of_journal(size_)), size_) {}

void ControlEndpoint::post_to_all(const Bytes& packet) {
  for (int other = 0; other < size_; ++other) {
    if (other != rank_) post(other, packet);
  }
}

Packet* ControlEndpoint::waiting_packet(std::uint64_t group_id, int world_rank) {
  const auto found = inbox_.find({group_id, world_rank});
  return found == inbox_.end() || found->second.empty() ? nullptr : &found->second.front();
}

Packet ControlEndpoint::take_packet(std::uint64_t group_id, int world_rank) {
  auto& packets = inbox_.at({group_id, world_rank});
  Packet packet = std::move(packets.front());
  packets.pop_front();
  return packet;
}

void ControlEndpoint::poll() {
  take_all_packets();
  if (advance_) advance_();
  flush();
}

void ControlEndpoint::handle(Packet packet, int from) {
  switch (packet.kind) {
    case PacketKind::kCall:
    case PacketKind::kTransfer:
    case PacketKind::kGo:
      has_news_ = true;
      waits_.promise(from, packet.entry.call);
      if (has_shared_journal_) {
        // its own rank has written it
      } else if (packet.kind == PacketKind::kCall) {
        journal_.enter(from, packet.entry);
      } else {
        journal_.promise(from, packet.entry.call);
      }
      [[fallthrough]];
    case PacketKind::kLane:
      inbox_[{packet.entry.call.group_id, from}].push_back(std::move(packet));
      return;
    case PacketKind::kWhereabouts: {
      has_news_ = true;
      std::vector<std::uint64_t> words(packet.data.size() / sizeof(std::uint64_t));
      std::memcpy(words.data(), packet.data.data(), words.size() * sizeof(words[0]));
      if (!has_shared_journal_) journal_.set_whereabouts(from, words);
      waits_.set_whereabouts(from, words);
      return;
    }
    case PacketKind::kAbort:
      take_abort(static_cast<AbortKind>(packet.groups_led),
                 {reinterpret_cast<const char*>(packet.data.data()), packet.data.size()});
      return;
    case PacketKind::kGoodbye:
      return;  // of those that tell who is gone
  }
}

void ControlEndpoint::take_abort(AbortKind kind, std::string_view reason) {
  if (is_aborted()) return;
  abort_reason_ = reason;
  abort_kind_ = kind;
  if (ends_process_) end_in_abort();
}

void ControlEndpoint::wait_until(const std::function<bool()>& done, const bool& moves_data,
                                 const RankSet* awaited) {
  poll();
  if (done()) return;
  const auto start = steady_clock::now();
  bool has_told = false;
  for (;;) {
    pause(moves_data);
    // asked first: what those who left have sent before is taken then
    const RankSet asked_for = awaited == nullptr ? RankSet{} : *awaited;
    const std::string gone = awaited == nullptr ? "" : why_gone(asked_for, moves_data);
    poll();
    if (done()) return;
    if (idle_) idle_();
    if (is_aborted()) throw_abort();
    // the one that is gone may be one of those that have just done their part
    if (!gone.empty() && *awaited == asked_for)
      fail(fmt::format("{}: {}", gone, journal_.describe_hang()));
    const auto now = steady_clock::now();
    if ((deadline_ && now >= *deadline_) || (patience_ && now - start >= *patience_)) {
      abort(AbortKind::kTimeout, fmt::format("deadline passed: {}", journal_.describe_hang()));
      throw_abort();
    }
    if (now - start < kTellAfter) continue;
    if (!has_told) tell_whereabouts();
    if (!has_told || has_news_) look_for_circle();
    has_told = true;
    // A core that a computing rank needs is of no use here.
    if (!moves_data && now - start > kRestAfter)
      std::this_thread::sleep_for(
          std::min<steady_clock::duration>((now - start) / 100, kLongestRest));
  }
}

void ControlEndpoint::tell_whereabouts() {
  const std::vector<std::uint64_t> words = journal_.whereabouts(rank_);
  waits_.set_whereabouts(rank_, words);
  Packet packet{.kind = PacketKind::kWhereabouts};
  packet.data.resize(words.size() * sizeof(words[0]));
  std::memcpy(packet.data.data(), words.data(), packet.data.size());
  post_to_all(encode(packet));
}

void ControlEndpoint::look_for_circle() {
  has_news_ = false;
  const auto own = journal_.last(rank_);
  if (own && own->group_size == 1) return;  // it waits for its device alone
  const std::string circle = waits_.describe_circular_wait(rank_);
  if (!circle.empty()) {
    fail(fmt::format("deadlock: {}; all ranks of a group must call it in the same order", circle));
  }
}

void ControlEndpoint::abort(AbortKind kind, std::string_view reason) noexcept {
  if (is_aborted()) return;
  if (ends_process_) end_in_abort();
  try {
    abort_reason_ = reason.substr(0, kLongestReason);
    abort_kind_ = kind;
    Packet packet{.kind = PacketKind::kAbort};
    packet.groups_led = static_cast<std::uint32_t>(kind);
    packet.data.resize(abort_reason_.size());
    std::memcpy(packet.data.data(), abort_reason_.data(), abort_reason_.size());
    post_to_all(encode(packet));
    flush();
  } catch (...) {
    abort_kind_ = kind;  // the others come to their deadline
  }
}

void ControlEndpoint::throw_abort() const {
  if (abort_kind_ == AbortKind::kTimeout) throw TimeoutError(abort_reason_);
  throw CommError(abort_reason_);
}

void ControlEndpoint::fail(const std::string& reason) {
  abort(AbortKind::kFailure, reason);
  throw_abort();
}

void ControlEndpoint::take_group_id() {
  if (num_ids_ < kMaxGroups) {
    ++num_ids_;
    return;
  }
  const std::string reason = fmt::format(
      "rank {}: there is no room for another group or pair of ranks that send to each other, "
      "because {} are in use; split once and keep the groups instead of splitting again",
      rank_, kMaxGroups);
  abort(AbortKind::kFailure, reason);
  throw InfrastructureError(reason);
}

}  // namespace isoshard
