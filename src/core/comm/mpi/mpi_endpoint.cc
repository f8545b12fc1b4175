// SPDX-License-Identifier: Apache-2.0
/// Packets through one communicator of MPI, data through another.
#include "core/comm/mpi/mpi_endpoint.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <span>

#include "core/base/error.h"
#include "core/comm/mpi/mpi_group.h"
#include "core/comm/mpi/mpi_job.h"

namespace isoshard {
namespace {

using std::chrono::steady_clock;

constexpr int kPacketTag = 1;
/// For how long ranks of an aborted world wait for each other where the world has no patience.
constexpr std::chrono::milliseconds kLongestLeave{60'000};
constexpr std::size_t kMostBytes = std::size_t{1} << 30;  ///< of one message; MPI counts in int

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
  if (MpiTags::number_for(size) - 1 > most) {
    throw UsageError(
        fmt::format("this MPI must have the {} tags that groups of {} ranks need, got {}; use "
                    "OpenMPI, or fewer ranks",
                    MpiTags::number_for(size), size, most));
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

int world_rank() {
  int rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  return rank;
}

}  // namespace

// Both communicators stay until the process ends: a later one would get their number, and with it
// packets that were sent to an aborted world.
MpiEndpoint::MpiEndpoint(ReductionOrder order) : MpiEndpoint(world_size(), order) {}

MpiEndpoint::MpiEndpoint(int size, ReductionOrder order)
    : ControlEndpoint(world_rank(), size, order) {
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
  const std::size_t lane = journal().num_lane_words(), words = lane + 1;
  std::vector<std::uint64_t> own(words), all(words * static_cast<std::size_t>(size()));
  journal().copy_lane(rank(), std::span(own).first(lane));
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
  for (int rank = 0; rank < size(); ++rank) {
    const auto theirs = std::span(all).subspan(static_cast<std::size_t>(rank) * words, words);
    journal().set_lane(rank, theirs.first(lane));
    word = std::max(word, theirs.back());
  }
  return word;
}

void MpiEndpoint::post(int world_rank, const Bytes& packet) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Isend(packet->data(), static_cast<int>(packet->size()), MPI_BYTE, world_rank,
                      kPacketTag, control_, &request),
            "MPI_Isend");
  int is_done = 0;
  check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
  if (is_done == 0) outgoing_.push_back({request, packet});
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

void MpiEndpoint::flush() {
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
          fmt::format("rank {} left a call while its data were on their way", rank()));
    for (MPI_Request& request : in_flight.receives) {
      if (request != MPI_REQUEST_NULL) check_mpi(MPI_Cancel(&request), "MPI_Cancel");
    }
    const auto limit = steady_clock::now() + patience().value_or(kLongestLeave);
    while (!are_done(in_flight)) {
      if (steady_clock::now() > limit) {
        throw TimeoutError(fmt::format(
            "another rank has not taken what was on its way to it, after: {}", abort_reason()));
      }
      serve();
      pause_between_polls();
    }
  } catch (const std::exception& error) {
    const std::string line =
        fmt::format("isoshard: rank {}: a failed world cannot be left safely: {}; the job ends\n",
                    rank(), error.what());
    (void)!::write(STDERR_FILENO, line.data(), line.size());
    isoshard::end_job_now();
  }
}

void MpiEndpoint::pause(bool /*moves_data*/) noexcept {
  pause_between_polls();
}

void MpiEndpoint::end_in_abort() noexcept {
  isoshard::end_in_abort();
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

}  // namespace isoshard
