// SPDX-License-Identifier: Apache-2.0
/// What a rank has once in an NCCL world: its end of the packets, its device, one stream for the
/// collectives of all groups, memory for them, and every communicator of NCCL.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/comm/nccl/gpu_api.h"
#include "core/comm/nccl/nccl_transfers.h"
#include "core/comm/tcp/tcp_endpoint.h"

namespace isoshard {

/// Memory of the device that the collectives of one stream use in turn, so that the stream's order
/// keeps them apart. Blocks that have become too small are kept: what was put into the stream
/// before may still use them.
class GpuScratch {
 public:
  explicit GpuScratch(GpuApi& api) : api_(&api) {}
  ~GpuScratch();
  GpuScratch(const GpuScratch&) = delete;
  GpuScratch& operator=(const GpuScratch&) = delete;
  /// What the last call took is free again.
  void begin_call() noexcept { used_ = 0; }
  [[nodiscard]] std::byte* take(std::size_t bytes);

 private:
  GpuApi* api_;
  std::vector<std::byte*> blocks_;
  std::size_t capacity_ = 0;  ///< of the last block
  std::size_t used_ = 0;
};

/// Page-locked memory of the host, through which data of callers go to the device and back. What a
/// call that failed has taken is kept: the device may still use it.
class HostStaging {
 public:
  explicit HostStaging(GpuApi& api) : api_(&api) {}
  ~HostStaging();
  HostStaging(const HostStaging&) = delete;
  HostStaging& operator=(const HostStaging&) = delete;
  [[nodiscard]] std::byte* take(std::size_t bytes);
  void give_back(std::byte* memory);

 private:
  GpuApi* api_;
  std::map<std::byte*, std::size_t> all_;
  std::multimap<std::size_t, std::byte*> free_;
};

class NcclRank {
 public:
  /// Ranks    collective over the job.
  /// Errors   as TcpEndpoint; GpuError.
  NcclRank(std::shared_ptr<TcpJob> job, std::shared_ptr<GpuApi> api, int device,
           ReductionOrder order, const SharedAbort* shared_abort = nullptr,
           std::byte* shared_journal = nullptr);
  ~NcclRank();
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  [[nodiscard]] TcpEndpoint& endpoint() noexcept { return endpoint_; }
  [[nodiscard]] GpuApi& api() noexcept { return *api_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] GpuStream stream() const noexcept { return stream_; }
  [[nodiscard]] GpuScratch& scratch() noexcept { return scratch_; }
  [[nodiscard]] HostStaging& staging() noexcept { return staging_; }
  [[nodiscard]] NcclTransfers& transfers() noexcept { return transfers_; }

  /// Runs `work`. An abort of the world, by whomever, ends this rank's kernels of NCCL, which wait
  /// for ranks that will not come; an error of CUDA or NCCL aborts the world.
  /// Errors   CommError, TimeoutError, and those of `work`.
  template <class Run>
  auto guarded(const Run& run) {
    try {
      api_->use_device(device_);  // of the calling thread
      return run();
    } catch (const CommError&) {
      end_kernels();
      throw;
    } catch (const GpuError& error) {
      fail(error.what());
    }
  }
  [[noreturn]] void fail(std::string_view what);

  /// A communicator of NCCL, under way; it lives as long as this rank.
  [[nodiscard]] NcclComm start_comm(const NcclId& id, int size, int rank);
  /// False while the communicator is under way.
  /// Errors   GpuError once it has failed.
  [[nodiscard]] bool is_ready(NcclComm comm);
  /// Waits until it can be called again.
  void until_ready(NcclComm comm, const RankSet& members);
  /// Waits until what is before the event is done, while watching the communicator (which may be
  /// null) for errors that come later.
  void until_done(GpuEvent event, NcclComm comm, const RankSet& members);

  [[nodiscard]] GpuEvent take_event();
  void give_back(GpuEvent event) { events_.push_back(event); }
  void abort(std::string_view reason) noexcept;

 private:
  void end_kernels() noexcept;

  std::shared_ptr<GpuApi> api_;
  int device_;
  TcpEndpoint endpoint_;
  GpuStream stream_ = nullptr;
  GpuScratch scratch_;
  HostStaging staging_;
  NcclTransfers transfers_;
  std::vector<NcclComm> comms_;
  std::vector<GpuEvent> events_;  ///< that nothing is waiting for
};

}  // namespace isoshard
