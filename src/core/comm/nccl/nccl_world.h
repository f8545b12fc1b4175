// SPDX-License-Identifier: Apache-2.0
/// The nccl backend: worlds whose ranks are processes with a GPU each, started by torchrun, mpirun
/// or srun, or forked by a launcher of this host.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "core/comm/attached_job.h"
#include "core/comm/nccl/gpu_api.h"
#include "core/comm/nccl/rank_variables.h"
#include "core/comm/transport.h"

namespace isoshard {

class TcpJob;

/// This process's end of a world of all processes of a job. A process may make several, all in the
/// same order.
///
/// Guarantees   journal() is exact for this rank. Of others it holds the calls that they made with
///              this rank, the one in which they last waited for 2 ms and more, and all as of the
///              last gather_journals().
/// Ranks        the constructor is local; communicator() makes the first packets.
class NcclWorld final : public AttachedWorld {
 public:
  /// Errors   GpuError.
  NcclWorld(std::shared_ptr<TcpJob> job, std::shared_ptr<GpuApi> api, int device,
            ReductionOrder order = ReductionOrder::kOrdered);
  ~NcclWorld() override;
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  [[nodiscard]] int size() const noexcept override;
  /// Of this process.
  [[nodiscard]] int rank() const noexcept;
  /// Errors   UsageError for another rank than this process's.
  [[nodiscard]] std::unique_ptr<Communicator> communicator(int rank) override;
  /// The first reason given stays; ranks that abort at the same time may report their own.
  void abort(std::string_view reason) noexcept override;
  [[nodiscard]] bool is_aborted() const noexcept;
  /// Of this process's clock; a rank that comes to it aborts the world.
  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept;
  void set_patience(std::optional<std::chrono::milliseconds> patience) noexcept override;
  [[nodiscard]] const Journal& journal() const noexcept override;
  /// Makes the journal exact for all ranks, and returns the largest `word` of all ranks.
  /// Ranks    collective over the world, also after an abort; none may be in a collective.
  std::uint64_t gather_journals(std::uint64_t word = 0);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// The processes of a job, which meet at the place that the variables name.
/// Ranks    collective over the job.
/// Errors   as TcpMesh.
[[nodiscard]] std::shared_ptr<TcpJob> meet_at(
    const RankVariables& variables,
    std::optional<std::chrono::steady_clock::time_point> deadline = {});

/// Joins the job that torchrun, mpirun or srun started, for launchers of worlds.
/// Ranks    collective over the job.
/// Errors   NotBuiltError where gpu_api() is empty; as read_rank_variables, TcpMesh; GpuError.
[[nodiscard]] std::unique_ptr<AttachedJob> attach_nccl_job();

/// Whether calls of `comm` take buffers of the rank's GPU: one of this backend does, also below
/// communicators that pass everything on (core/comm/passes_on.h). Others see host memory alone.
[[nodiscard]] bool takes_device_memory(const Communicator& comm) noexcept;

/// Worlds whose ranks are forked on this host, rank r on device r modulo their number. Their
/// journal is shared memory, exact for all, and the process that forks them uses no CUDA.
/// Errors   where a rank starts: as attach_nccl_job.
[[nodiscard]] Transport nccl_transport();

}  // namespace isoshard
