// SPDX-License-Identifier: Apache-2.0
/// The few functions of CUDA and NCCL that the nccl backend calls, as one table: the real ones
/// (cuda_api.h), or in tests a stand-in on host memory.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/base/error.h"
#include "core/comm/communicator.h"
#include "core/comm/nccl/gathered_reduction.h"

namespace isoshard {

/// A function of CUDA or NCCL that failed, with its name and the library's words.
class GpuError : public InfrastructureError {
 public:
  using InfrastructureError::InfrastructureError;
};

/// As cudaStream_t; null is the device's default stream.
using GpuStream = void*;
/// As cudaEvent_t.
using GpuEvent = void*;
/// As ncclComm_t.
using NcclComm = void*;
/// As ncclUniqueId.
using NcclId = std::array<std::byte, 128>;

/// What ncclCommGetAsyncError says.
struct NcclState {
  enum class Kind : std::uint8_t { kReady, kInProgress, kFailed } kind = Kind::kReady;
  std::string words{};  ///< of a failure
};

/// Everything below is asynchronous where CUDA's and NCCL's own functions are. Communicators are
/// not blocking (ncclConfig_t): start_comm() and group_end() return while state() is kInProgress,
/// and nothing else may be called with the communicator until it is not.
///
/// Ranks    local; one thread at a time.
/// Errors   GpuError.
class GpuApi {
 public:
  virtual ~GpuApi() = default;
  /// "CUDA 13.0, NCCL 2.28.9", or what stands in for them.
  [[nodiscard]] virtual std::string name() const = 0;
  /// Of this process.
  [[nodiscard]] virtual int num_devices() = 0;
  virtual void use_device(int index) = 0;

  [[nodiscard]] virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void free(std::byte* memory) noexcept = 0;
  /// Page-locked memory of the host: a copy from or to it never keeps the calling thread.
  [[nodiscard]] virtual std::byte* allocate_host(std::size_t bytes) = 0;
  virtual void free_host(std::byte* memory) noexcept = 0;
  [[nodiscard]] virtual GpuStream make_stream() = 0;
  virtual void destroy_stream(GpuStream stream) noexcept = 0;
  [[nodiscard]] virtual GpuEvent make_event() = 0;
  virtual void destroy_event(GpuEvent event) noexcept = 0;
  virtual void record(GpuEvent event, GpuStream stream) = 0;
  /// What is put into the stream from here on waits for the event.
  virtual void wait_for(GpuEvent event, GpuStream stream) = 0;
  [[nodiscard]] virtual bool is_done(GpuEvent event) = 0;
  /// From device to device, or between it and memory of allocate_host().
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes, GpuStream stream) = 0;
  virtual void reduce(const GatheredReduction& task, GpuStream stream) = 0;

  [[nodiscard]] virtual NcclId make_id() = 0;
  [[nodiscard]] virtual NcclComm start_comm(const NcclId& id, int size, int rank) = 0;
  [[nodiscard]] virtual NcclState state(NcclComm comm) = 0;
  /// Ends its kernels on this rank, whether or not the others come.
  virtual void abort_comm(NcclComm comm) noexcept = 0;
  virtual void destroy_comm(NcclComm comm) noexcept = 0;
  /// What is called between them, on one communicator and stream, moves at once.
  virtual void group_start() = 0;
  virtual void group_end() = 0;
  virtual void send(const std::byte* data, std::size_t bytes, int peer, NcclComm comm,
                    GpuStream stream) = 0;
  virtual void recv(std::byte* data, std::size_t bytes, int peer, NcclComm comm,
                    GpuStream stream) = 0;
  /// `to` holds `bytes` of each rank, in rank order.
  virtual void all_gather(const std::byte* from, std::byte* to, std::size_t bytes, NcclComm comm,
                          GpuStream stream) = 0;
  virtual void broadcast(std::byte* data, std::size_t bytes, int root, NcclComm comm,
                         GpuStream stream) = 0;
  /// Whether NCCL's own reductions know the dtype: all but int16 and bool.
  [[nodiscard]] static constexpr bool has_native(Dtype dtype) noexcept {
    return dtype != Dtype::kInt16 && dtype != Dtype::kBool;
  }
  virtual void native_all_reduce(std::byte* data, std::int64_t count, Dtype dtype,
                                 Reduction reduction, NcclComm comm, GpuStream stream) = 0;
  virtual void native_reduce_scatter(const std::byte* from, std::byte* to, std::int64_t count,
                                     Dtype dtype, Reduction reduction, NcclComm comm,
                                     GpuStream stream) = 0;
  virtual void native_reduce(const std::byte* from, std::byte* to, std::int64_t count, Dtype dtype,
                             Reduction reduction, int root, NcclComm comm, GpuStream stream) = 0;
};

/// Makes the table in the process of a rank: nothing of CUDA may be called before a fork.
/// `local_rank` is one of `local_size` ranks of the host.
using GpuApiFactory = std::function<std::shared_ptr<GpuApi>(int local_rank, int local_size)>;

/// The one that attach_nccl_world(), attach_nccl_job() and nccl_transport() use. Programs for GPUs
/// set it at their start (cuda_api.h).
void set_gpu_api(GpuApiFactory factory);
/// Empty if none is set.
[[nodiscard]] const GpuApiFactory& gpu_api() noexcept;

}  // namespace isoshard
