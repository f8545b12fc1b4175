// SPDX-License-Identifier: Apache-2.0
/// Collectives over NCCL: announced by packets, moved by NCCL, and added by the kernels of
/// gathered_reduction.h, so that all backends give the same bits.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/comm/communicator.h"
#include "core/comm/control/group_calls.h"
#include "core/comm/nccl/nccl_launch.h"
#include "core/comm/nccl/nccl_rank.h"

namespace isoshard {

/// A rank's end of one group. A call returns when all ranks of the group have made it and what
/// moves is in the streams; wait() returns when it has moved, on the host, so that any stream may
/// use the result. Buffers are on the rank's device, where a call comes after what their streams
/// already hold, or on the host, from where they are copied.
///
/// Errors   as Communicator; UsageError for buffers on another device, or of the host on a stream.
///          All calls of this rank come from one thread at a time.
class NcclCommunicator final : public Communicator {
 public:
  /// The group of the whole world.
  explicit NcclCommunicator(std::shared_ptr<NcclRank> world);

  [[nodiscard]] int rank() const noexcept override { return calls_.rank(); }
  [[nodiscard]] int size() const noexcept override { return calls_.size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return world_->endpoint().reduction_order();
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
  void abort(std::string_view reason) noexcept override { world_->abort(reason); }

 private:
  using Counts = std::span<const std::int64_t>;
  NcclCommunicator(std::shared_ptr<NcclRank> world, GroupCalls calls);

  void check(const ConstBuffer& buffer, const char* op, const char* name) const;
  /// Announces a call that moves data.
  [[nodiscard]] NcclLaunch meet(Packet own, const CallInfo& info);
  [[nodiscard]] int next(int step) const noexcept { return (calls_.rank() + step) % size(); }

  void reduce_small(NcclLaunch& launch, std::byte* data, const Buffer& buffer,
                    Reduction reduction) const;
  void reduce_in_slices(NcclLaunch& launch, std::byte* data, const Buffer& buffer,
                        Reduction reduction) const;
  void gather_blocks(NcclLaunch& launch, const std::byte* input, std::byte* output, Dtype dtype,
                     Counts counts) const;
  void reduce_blocks(NcclLaunch& launch, const std::byte* input, std::byte* output, Dtype dtype,
                     Counts counts, Reduction reduction) const;
  void reduce_blocks_natively(NcclLaunch& launch, const std::byte* input, std::byte* output,
                              Dtype dtype, Counts counts, Reduction reduction) const;
  [[nodiscard]] bool is_native(Dtype dtype) const noexcept {
    return reduction_order() == ReductionOrder::kNative && GpuApi::has_native(dtype);
  }
  /// In which order our kernels add. What NCCL's own reductions lack has no roundings, so that
  /// every order gives the same.
  [[nodiscard]] ReductionOrder own_order() const noexcept {
    return reduction_order() == ReductionOrder::kNative ? ReductionOrder::kOrdered
                                                        : reduction_order();
  }
  [[nodiscard]] std::shared_ptr<NcclMoving> queue(bool is_send, int peer, Buffer data,
                                                  const CallInfo& info);

  std::shared_ptr<NcclRank> world_;
  GroupCalls calls_;
  NcclGroup group_;
};

}  // namespace isoshard
