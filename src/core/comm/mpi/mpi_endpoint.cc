// SPDX-License-Identifier: Apache-2.0
/// Polling: packets in, packets out, and the ways in which a wait ends.
#include "core/comm/mpi/mpi_endpoint.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "core/base/error.h"
#include "core/comm/mpi/mpi_group.h"
#include "core/comm/mpi/mpi_job.h"

namespace isoshard {
namespace {

using std::chrono::steady_clock;

constexpr int kPacketTag = 1;
constexpr std::size_t kMostBytes = std::size_t{1} << 30;  ///< of one message; MPI counts in int
constexpr std::size_t kLongestReason = 2000;
/// A rank that waits for so long tells all ranks what it waits for.
constexpr std::chrono::milliseconds kTellAfter{2};
/// A rank that has waited for so long, with nothing under way, gives its core away: for a hundredth
/// of the time that it has waited, so that who waits for seconds costs next to nothing.
constexpr std::chrono::milliseconds kRestAfter{5};
constexpr std::chrono::milliseconds kLongestRest{1};
/// For how long ranks of an aborted world wait for each other where the world has no patience.
constexpr std::chrono::milliseconds kLongestLeave{60'000};

std::size_t bytes_of_journal(int size) {
  // room to begin at a multiple of 64
  return Journal::bytes(size) + 64;
}

std::byte* aligned(std::byte* memory) {
  void* begin = memory;
  std::size_t space = 64 + 64;
  return static_cast<std::byte*>(std::align(64, 64, begin, space));
}

int world_size() {
  start_mpi();
  int size = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  if (size > kMaxRanks) {
    throw UsageError(fmt::format("the number of ranks must be from 1 to {} on this backend, got {}",
                                 kMaxRanks, size));
  }
  int is_known = 0;
  const int* largest_tag = nullptr;
  check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest_tag, &is_known),
            "MPI_Comm_get_attr");
  const int most = is_known != 0 ? *largest_tag : 32767;  // what every MPI has
  if (MpiGroup::num_tags(size) - 1 > most) {
    throw UsageError(
        fmt::format("this MPI must have the {} tags that groups of {} ranks need, got {}; use "
                    "OpenMPI, or fewer ranks",
                    MpiGroup::num_tags(size), size, most));
  }
  return size;
}

MPI_Comm duplicate() {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request), "MPI_Comm_idup");
  await(request);
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

}  // namespace

// Both communicators stay until the process ends: a later one would get their number, and with it
// packets that were sent to an aborted world.
MpiEndpoint::MpiEndpoint(ReductionOrder order)
    : size_(world_size()),
      order_(order),
      journal_memory_(2 * bytes_of_journal(size_)),
      journal_(aligned(journal_memory_.data()), size_),
      waits_(aligned(journal_memory_.data() + bytes_of_journal(size_)), size_) {
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  control_ = duplicate();
  data_ = duplicate();
}

// What is still on its way was left by an abort, or goes to a rank that no longer listens.
MpiEndpoint::~MpiEndpoint() {
  int is_ended = 0;
  MPI_Finalized(&is_ended);
  static std::deque<Outgoing>& left_behind = *new std::deque<Outgoing>;
  for (std::deque<Outgoing>* messages : {&outgoing_, &leftovers_}) {
    for (Outgoing& message : *messages) {
      int is_done = 0;
      if (is_ended == 0) MPI_Test(&message.request, &is_done, MPI_STATUS_IGNORE);
      if (is_done == 0) left_behind.push_back(std::move(message));
    }
  }
}

std::uint64_t MpiEndpoint::gather_journals(std::uint64_t word) {
  const std::size_t lane = journal_.num_lane_words(), words = lane + 1;
  std::vector<std::uint64_t> own(words), all(words * static_cast<std::size_t>(size_));
  journal_.copy_lane(rank_, std::span(own).first(lane));
  own.back() = word;
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Iallgather(own.data(), static_cast<int>(words), MPI_UINT64_T, all.data(),
                           static_cast<int>(words), MPI_UINT64_T, control_, &request),
            "MPI_Iallgather");
  // ranks that are still on their way here may have sent what this one must take
  for (int is_done = 0;;) {
    check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    if (is_done != 0) break;
    serve();
    pause_between_polls();
  }
  for (int rank = 0; rank < size_; ++rank) {
    const auto theirs = std::span(all).subspan(static_cast<std::size_t>(rank) * words, words);
    journal_.set_lane(rank, theirs.first(lane));
    word = std::max(word, theirs.back());
  }
  return word;
}

void MpiEndpoint::post(int world_rank,
                       const std::shared_ptr<const std::vector<std::byte>>& packet) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Isend(packet->data(), static_cast<int>(packet->size()), MPI_BYTE, world_rank,
                      kPacketTag, control_, &request),
            "MPI_Isend");
  int is_done = 0;
  check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
  if (is_done == 0) outgoing_.push_back({request, packet});
}

Packet* MpiEndpoint::waiting_packet(std::uint64_t group_id, int world_rank) {
  const auto found = inbox_.find({group_id, world_rank});
  return found == inbox_.end() || found->second.empty() ? nullptr : &found->second.front();
}

Packet MpiEndpoint::take_packet(std::uint64_t group_id, int world_rank) {
  auto& packets = inbox_.at({group_id, world_rank});
  Packet packet = std::move(packets.front());
  packets.pop_front();
  return packet;
}

void MpiEndpoint::start_receive(const Piece& piece, int tag, InFlight& in_flight) const {
  for (std::size_t begin = 0; begin < piece.bytes; begin += kMostBytes) {
    check_mpi(
        MPI_Irecv(piece.data + begin, static_cast<int>(std::min(kMostBytes, piece.bytes - begin)),
                  MPI_BYTE, piece.world_rank, tag, data_,
                  &in_flight.receives.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Irecv");
  }
}

void MpiEndpoint::start_send(const Piece& piece, int tag, bool must_be_taken,
                             InFlight& in_flight) const {
  const auto send = must_be_taken ? MPI_Issend : MPI_Isend;
  for (std::size_t begin = 0; begin < piece.bytes; begin += kMostBytes) {
    check_mpi(send(piece.data + begin, static_cast<int>(std::min(kMostBytes, piece.bytes - begin)),
                   MPI_BYTE, piece.world_rank, tag, data_,
                   &in_flight.sends.emplace_back(MPI_REQUEST_NULL)),
              "MPI_Isend");
  }
}

void MpiEndpoint::start_empty(int world_rank, int tag, bool is_send, InFlight& in_flight) const {
  MPI_Request& request =
      (is_send ? in_flight.sends : in_flight.receives).emplace_back(MPI_REQUEST_NULL);
  check_mpi(is_send ? MPI_Issend(nullptr, 0, MPI_BYTE, world_rank, tag, data_, &request)
                    : MPI_Irecv(nullptr, 0, MPI_BYTE, world_rank, tag, data_, &request),
            "MPI_Issend or MPI_Irecv");
}

bool MpiEndpoint::are_done(Requests& requests) {
  int is_done = 0;
  check_mpi(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &is_done,
                        MPI_STATUSES_IGNORE),
            "MPI_Testall");
  return is_done != 0;
}

void MpiEndpoint::poll() {
  take_all_packets();
  if (advance_) advance_();
  drop_done(outgoing_);
}

void MpiEndpoint::drop_done(std::deque<Outgoing>& messages) {
  while (!messages.empty()) {
    int is_done = 0;
    check_mpi(MPI_Test(&messages.front().request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    if (is_done == 0) return;
    messages.pop_front();
  }
}

void MpiEndpoint::serve() {
  poll();
  if (is_aborted()) take_leftovers();
}

// No rank of an aborted world posts another receive (every call looks first), so what has met none
// is awaited by nobody.
void MpiEndpoint::take_leftovers() {
  for (;;) {
    int is_there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, data_, &is_there, &message, &status),
              "MPI_Improbe");
    if (is_there == 0) break;
    int count = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
    const auto bytes = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(count));
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Imrecv(bytes->data(), count, MPI_BYTE, &message, &request), "MPI_Imrecv");
    leftovers_.push_back({request, bytes});
  }
  drop_done(leftovers_);
}

InFlight::~InFlight() {
  endpoint_->take_back(*this);
}

void MpiEndpoint::take_back(InFlight& in_flight) noexcept {
  if (in_flight.receives.empty() && in_flight.sends.empty()) return;
  int is_ended = 0;
  MPI_Finalized(&is_ended);
  if (is_ended != 0) return;
  try {
    if (are_done(in_flight)) return;
    abort(AbortKind::kFailure,
          fmt::format("rank {} left a call while its data were on their way", rank_));
    for (MPI_Request& request : in_flight.receives) {
      if (request != MPI_REQUEST_NULL) check_mpi(MPI_Cancel(&request), "MPI_Cancel");
    }
    const auto limit = steady_clock::now() + patience_.value_or(kLongestLeave);
    while (!are_done(in_flight)) {
      if (steady_clock::now() > limit) {
        throw TimeoutError(fmt::format(
            "another rank has not taken what was on its way to it, after: {}", abort_reason_));
      }
      serve();
      pause_between_polls();
    }
  } catch (const std::exception& error) {
    const std::string line =
        fmt::format("isoshard: rank {}: a failed world cannot be left safely: {}; the job ends\n",
                    rank_, error.what());
    (void)!::write(STDERR_FILENO, line.data(), line.size());
    end_job_now();
  }
}

void MpiEndpoint::take_all_packets() {
  std::vector<std::byte> bytes;
  for (;;) {
    int is_there = 0;
    MPI_Status status;
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, kPacketTag, control_, &is_there, &status), "MPI_Iprobe");
    if (is_there == 0) return;
    int count = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
    bytes.resize(static_cast<std::size_t>(count));
    check_mpi(MPI_Recv(bytes.data(), count, MPI_BYTE, status.MPI_SOURCE, kPacketTag, control_,
                       MPI_STATUS_IGNORE),
              "MPI_Recv");
    handle(decode(bytes), status.MPI_SOURCE);
  }
}

void MpiEndpoint::handle(Packet packet, int from) {
  switch (packet.kind) {
    case PacketKind::kCall:
    case PacketKind::kTransfer:
      has_news_ = true;
      waits_.promise(from, packet.entry.call);
      if (packet.kind == PacketKind::kCall) {
        journal_.enter(from, packet.entry);
      } else {
        journal_.promise(from, packet.entry.call);
      }
      inbox_[{packet.entry.call.group_id, from}].push_back(std::move(packet));
      return;
    case PacketKind::kWhereabouts: {
      has_news_ = true;
      std::vector<std::uint64_t> words(packet.data.size() / sizeof(std::uint64_t));
      std::memcpy(words.data(), packet.data.data(), words.size() * sizeof(words[0]));
      journal_.set_whereabouts(from, words);
      waits_.set_whereabouts(from, words);
      return;
    }
    case PacketKind::kAbort:
      if (is_aborted()) return;
      abort_reason_.assign(reinterpret_cast<const char*>(packet.data.data()), packet.data.size());
      abort_kind_ = static_cast<AbortKind>(packet.groups_led);
      if (ends_process_) end_in_abort();
      return;
  }
}

void MpiEndpoint::wait_until(const std::function<bool()>& done, const bool& moves_data) {
  poll();
  if (done()) return;
  const auto start = steady_clock::now();
  bool has_told = false;
  for (;;) {
    pause_between_polls();
    poll();
    if (done()) return;
    if (idle_) idle_();
    if (is_aborted()) throw_abort();
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

void MpiEndpoint::tell_whereabouts() {
  const std::vector<std::uint64_t> words = journal_.whereabouts(rank_);
  waits_.set_whereabouts(rank_, words);
  Packet packet{.kind = PacketKind::kWhereabouts};
  packet.data.resize(words.size() * sizeof(words[0]));
  std::memcpy(packet.data.data(), words.data(), packet.data.size());
  const auto bytes = encode(packet);
  for (int other = 0; other < size_; ++other) {
    if (other != rank_) post(other, bytes);
  }
}

void MpiEndpoint::look_for_circle() {
  has_news_ = false;
  const std::string circle = waits_.describe_circular_wait(rank_);
  if (!circle.empty()) {
    fail(fmt::format("deadlock: {}; all ranks of a group must call it in the same order", circle));
  }
}

void MpiEndpoint::abort(AbortKind kind, std::string_view reason) noexcept {
  if (is_aborted()) return;
  if (ends_process_) end_in_abort();
  try {
    abort_reason_ = reason.substr(0, kLongestReason);
    abort_kind_ = kind;
    Packet packet{.kind = PacketKind::kAbort};
    packet.groups_led = static_cast<std::uint32_t>(kind);
    packet.data.resize(abort_reason_.size());
    std::memcpy(packet.data.data(), abort_reason_.data(), abort_reason_.size());
    const auto bytes = encode(packet);
    for (int other = 0; other < size_; ++other) {
      if (other != rank_) post(other, bytes);
    }
  } catch (...) {
    abort_kind_ = kind;  // the others come to their deadline
  }
}

void MpiEndpoint::throw_abort() const {
  if (abort_kind_ == AbortKind::kTimeout) throw TimeoutError(abort_reason_);
  throw CommError(abort_reason_);
}

void MpiEndpoint::fail(const std::string& reason) {
  abort(AbortKind::kFailure, reason);
  throw_abort();
}

void MpiEndpoint::take_group_id() {
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
