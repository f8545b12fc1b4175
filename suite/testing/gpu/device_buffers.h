// SPDX-License-Identifier: Apache-2.0
/// Lets tests that have their data on the host call a communicator with buffers of a device.
#pragma once
#include <memory>
#include <span>
#include <string_view>

#include "core/comm/communicator.h"
#include "core/comm/nccl/gpu_api.h"

namespace isoshard {

/// Copies what is read to the device on a stream of the caller's, calls the communicator with
/// buffers there at once, and copies what is written back when its Work is done. So a communicator
/// that does not wait for the caller's stream reads memory that was never written.
class DeviceBuffers final : public Communicator {
 public:
  DeviceBuffers(std::unique_ptr<Communicator> inner, std::shared_ptr<GpuApi> api, int device);
  ~DeviceBuffers() override;

  [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_->size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return inner_->reduction_order();
  }
  [[nodiscard]] int world_rank_of(int rank) const override { return inner_->world_rank_of(rank); }

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
  void barrier(const CallInfo& info) override { inner_->barrier(info); }
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override;
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

 private:
  class Call;
  std::unique_ptr<Communicator> inner_;
  std::shared_ptr<GpuApi> api_;
  int device_;
  GpuStream stream_;
};

}  // namespace isoshard
