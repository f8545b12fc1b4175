// SPDX-License-Identifier: Apache-2.0
/// Collectives over MPI: announced by packets, moved between pairs of ranks, and added by the
/// functions of reduce.h, so that all backends give the same bits.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/control/group_calls.h"
#include "core/comm/mpi/mpi_endpoint.h"
#include "core/comm/mpi/mpi_group.h"
#include "core/comm/mpi/mpi_transfers.h"

namespace isoshard {

/// What a rank has once in an MPI world.
struct MpiRank {
  explicit MpiRank(ReductionOrder order) : endpoint(order), transfers(endpoint) {
    endpoint.set_advance([this] { transfers.advance(); });
  }
  MpiEndpoint endpoint;
  MpiTransfers transfers;
  std::vector<std::byte> scratch{};  ///< of reductions, kept between calls
};

/// A rank's end of one group. All data of a collective have moved when its call returns, as on
/// shared memory. send_recv returns at once; what is on its way moves on in every later call.
///
/// Errors   as Communicator; all calls of this rank come from one thread at a time.
class MpiCommunicator final : public Communicator {
 public:
  /// The group of the whole world.
  explicit MpiCommunicator(std::shared_ptr<MpiRank> world);

  [[nodiscard]] int rank() const noexcept override { return calls_.rank(); }
  [[nodiscard]] int size() const noexcept override { return calls_.size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return world_->endpoint.reduction_order();
  }
  [[nodiscard]] int world_rank_of(int rank) const override { return calls_.world_rank_of(rank); }

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override;
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override;
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                      const CallInfo& info) override;
  using Communicator::all_to_all;
  Work all_gather_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                         const CallInfo& info) override;
  Work reduce_scatter_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             Reduction reduction, const CallInfo& info) override;
  Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                  std::span<const std::int64_t> output_counts, const CallInfo& info) override;
  Work send(ConstBuffer data, int to, const CallInfo& info) override;
  Work recv(Buffer data, int from, const CallInfo& info) override;
  Work send_recv(std::span<const Transfer> transfers) override;
  Work broadcast(Buffer data, int root, const CallInfo& info) override;
  void barrier(const CallInfo& info) override;
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override;
  void abort(std::string_view reason) noexcept override;

 private:
  using Counts = std::span<const std::int64_t>;
  MpiCommunicator(std::shared_ptr<MpiRank> world, GroupCalls calls);

  /// Pieces by group rank; returns when all have moved. One to this rank itself is left out.
  void exchange(std::span<const Piece> receives, std::span<const Piece> sends);

  void gather_blocks(ConstBuffer input, Buffer output, Counts counts);
  void reduce_blocks(Reduction reduction, ConstBuffer input, Buffer output, Counts counts);
  void reduce_small(const MetCall& call, Buffer data);
  void reduce_in_slices(const MetCall& call, Buffer data);
  struct Slices;
  /// Waits for a request of MPI's own reductions.
  [[nodiscard]] std::function<void(MPI_Request&)> waiter() const;
  void add_own_slice(const Slices& slices, const CollectiveCall& call);
  [[nodiscard]] std::shared_ptr<MpiMoving> queue(bool is_send, int peer, Buffer data,
                                                 const CallInfo& info, bool must_be_taken);

  std::shared_ptr<MpiRank> world_;
  GroupCalls calls_;
  MPI_Comm native_ = MPI_COMM_NULL;  ///< for order native only
  int rank_;
  int size_;
};

}  // namespace isoshard
