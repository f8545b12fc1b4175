// SPDX-License-Identifier: Apache-2.0
/// One process's end of an MPI world: packets and data as messages of MPI.
#pragma once
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/comm/control/control_endpoint.h"

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

class MpiEndpoint final : public ControlEndpoint {
 public:
  /// Ranks    collective over MPI_COMM_WORLD.
  /// Errors   UsageError for more than kMaxRanks ranks, or for more than MPI has tags for;
  ///          InfrastructureError.
  explicit MpiEndpoint(ReductionOrder order);
  ~MpiEndpoint() override;

  [[nodiscard]] MPI_Comm data_comm() const noexcept { return data_; }
  /// Makes every lane of the journal exact, and returns the largest `word`.
  /// Ranks   collective over the world.
  std::uint64_t gather_journals(std::uint64_t word);

  void post(int world_rank, const Bytes& packet) override;

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

 protected:
  void take_all_packets() override;
  void flush() override;
  void pause(bool moves_data) noexcept override;
  void end_in_abort() noexcept override;

 private:
  MpiEndpoint(int size, ReductionOrder order);

  MPI_Comm control_ = MPI_COMM_NULL;
  MPI_Comm data_ = MPI_COMM_NULL;
  struct Outgoing {
    MPI_Request request;
    Bytes bytes;
  };
  static void drop_done(std::deque<Outgoing>& messages);
  void take_leftovers();
  std::deque<Outgoing> outgoing_;
  std::deque<Outgoing> leftovers_;  ///< received for nobody
};

}  // namespace isoshard
