// SPDX-License-Identifier: Apache-2.0
/// One process's end of an MPI world: packets between ranks, who waits for whom, aborts, deadline.
///
/// Words. A *packet* is a small message that its receiver takes whenever it polls: the
/// announcement of a call, the header of a transfer, a waiting rank's lane of the journal, or an
/// abort. Packets of one rank arrive in the order in which it sent them. *Data* are the bytes of
/// tensors; they move only when both sides have announced them.
///
/// Every rank holds a journal of all ranks. Its own lane is exact. Those of others hold what they
/// announced here, and where they were in their last long wait: a rank that has waited for
/// kTellAfter tells all its whereabouts. A second journal holds those of waiting ranks only. As
/// packets keep their order, a circle of waits in it that goes through this rank is a deadlock:
/// what a rank waits for has not come, as the next rank of the circle is stuck, up to this rank,
/// which knows what it has sent.
#pragma once
#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/comm/collective.h"
#include "core/comm/journal.h"
#include "core/comm/mpi/packet.h"

namespace isoshard {

/// Bytes to or from a world rank.
struct Piece {
  int world_rank = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// Requests that are under way, in chunks below MPI's limit of 2^31 - 1.
using Requests = std::vector<MPI_Request>;

class MpiEndpoint;

/// Bytes of a caller that MPI moves. MPI reads and writes them until the requests are done, so who
/// leaves before, by an exception, must take them back first: the destructor does
/// (MpiEndpoint::take_back).
class InFlight {
 public:
  explicit InFlight(MpiEndpoint& endpoint) : endpoint_(&endpoint) {}
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
  Requests receives{};
  Requests sends{};

 private:
  MpiEndpoint* endpoint_;
};

class MpiEndpoint {
 public:
  enum class AbortKind : std::uint8_t { kFailure = 1, kTimeout = 2 };

  /// Ranks    collective over MPI_COMM_WORLD.
  /// Errors   UsageError for more than kMaxRanks ranks, or for more than MPI has tags for;
  ///          InfrastructureError.
  explicit MpiEndpoint(ReductionOrder order);
  ~MpiEndpoint();
  MpiEndpoint(const MpiEndpoint&) = delete;
  MpiEndpoint& operator=(const MpiEndpoint&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept { return order_; }
  [[nodiscard]] Journal& journal() noexcept { return journal_; }
  [[nodiscard]] MPI_Comm data_comm() const noexcept { return data_; }
  /// Makes every lane of the journal exact, and returns the largest `word`.
  /// Ranks   collective over the world.
  std::uint64_t gather_journals(std::uint64_t word);

  /// Sends a packet. Does not wait.
  void post(int world_rank, const std::shared_ptr<const std::vector<std::byte>>& packet);
  /// The oldest packet of a group or channel from a rank that has not been taken; null if there is
  /// none.
  [[nodiscard]] Packet* waiting_packet(std::uint64_t group_id, int world_rank);
  [[nodiscard]] Packet take_packet(std::uint64_t group_id, int world_rank);

  /// Starts to move bytes that both sides have announced. Pieces between two ranks with one tag
  /// meet in their order.
  void start_receive(const Piece& piece, int tag, InFlight& in_flight) const;
  void start_send(const Piece& piece, int tag, bool must_be_taken, InFlight& in_flight) const;
  /// A message without bytes. A send of it is done when the other side has received it.
  void start_empty(int world_rank, int tag, bool is_send, InFlight& in_flight) const;
  [[nodiscard]] static bool are_done(Requests& requests);
  [[nodiscard]] static bool are_done(InFlight& in_flight) {
    return are_done(in_flight.receives) && are_done(in_flight.sends);
  }
  /// Returns when MPI no longer touches the bytes; at once where all have moved. What has not is
  /// given up, which aborts the world: receives that have met no message are cancelled, and sends
  /// wait for their receivers, who take what comes in serve().
  ///
  /// Errors   none. Where a receiver does not come back within the world's patience (a minute where
  ///          it has none), the job ends with exit code 4 and a line that says why: MPI would write
  ///          into memory that is in use again.
  void take_back(InFlight& in_flight) noexcept;
  /// Keeps an aborted world moving, for the ranks that still leave it: takes packets, and receives
  /// what nobody waits for any more into memory of its own. Does not wait.
  void serve();

  /// Takes packets and moves on what is under way. Does not wait.
  void poll();
  /// Polls until done() is true. `moves_data`: bytes are under way, which move only when polled.
  /// Errors   CommError when the world is aborted or ranks wait in a circle; TimeoutError.
  void wait_until(const std::function<bool()>& done, const bool& moves_data);
  /// Called in every poll: what moves transfers.
  void set_advance(std::function<void()> advance) { advance_ = std::move(advance); }
  /// Called between two polls of a wait; empty: nothing.
  void set_idle(std::function<void()> idle) { idle_ = std::move(idle); }

  /// From now on an abort also says that the process ends in MPI_Abort.
  void ends_process_in_abort() noexcept { ends_process_ = true; }
  void abort(AbortKind kind, std::string_view reason) noexcept;
  [[nodiscard]] bool is_aborted() const noexcept { return abort_kind_.has_value(); }
  [[noreturn]] void throw_abort() const;
  [[noreturn]] void fail(const std::string& reason);
  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
    deadline_ = deadline;
  }
  /// For how long one call may wait; without a value as long as it takes.
  void set_patience(std::optional<std::chrono::milliseconds> patience) noexcept {
    patience_ = patience;
  }

  /// The number of the next group that this rank leads, and room for `num_ids` ids in its lane.
  [[nodiscard]] std::uint32_t num_groups_led() const noexcept { return num_groups_led_; }
  void count_group_led() noexcept { ++num_groups_led_; }
  /// Errors   InfrastructureError if a rank's journal has no room for another group or channel.
  void take_group_id();

 private:
  void take_all_packets();
  void take_leftovers();
  void handle(Packet packet, int from);
  void tell_whereabouts();
  void look_for_circle();

  MPI_Comm control_ = MPI_COMM_NULL;
  MPI_Comm data_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  ReductionOrder order_;
  std::vector<std::byte> journal_memory_;
  Journal journal_;
  Journal waits_;  ///< where ranks were in their last long wait
  std::map<std::pair<std::uint64_t, int>, std::deque<Packet>> inbox_;
  struct Outgoing {
    MPI_Request request;
    std::shared_ptr<const std::vector<std::byte>> bytes;
  };
  static void drop_done(std::deque<Outgoing>& messages);
  std::deque<Outgoing> outgoing_;
  std::deque<Outgoing> leftovers_;  ///< received for nobody
  std::function<void()> advance_;
  std::function<void()> idle_;
  std::optional<AbortKind> abort_kind_;
  std::string abort_reason_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  std::optional<std::chrono::milliseconds> patience_;
  std::uint32_t num_groups_led_ = 1;
  std::uint32_t num_ids_ = 1;
  bool ends_process_ = false;
  bool has_news_ = false;  ///< of waits, since the last look for circles
};

}  // namespace isoshard
