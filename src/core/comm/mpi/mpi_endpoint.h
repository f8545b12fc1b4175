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
  void start_receive(const Piece& piece, int tag, Requests& requests) const;
  void start_send(const Piece& piece, int tag, bool must_be_taken, Requests& requests) const;
  /// A message without bytes. A send of it is done when the other side has received it.
  void start_empty(int world_rank, int tag, bool is_send, Requests& requests) const;
  [[nodiscard]] static bool are_done(Requests& requests);

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
  std::deque<Outgoing> outgoing_;
};

}  // namespace isoshard
