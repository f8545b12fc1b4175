// SPDX-License-Identifier: Apache-2.0
/// What the processes that somebody else started (mpirun, srun) have in common: worlds that they
/// make together, one agreement that outlives a broken world, and their end.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/comm/communicator.h"
#include "core/comm/transport.h"

namespace isoshard {

/// A world of all processes of a job.
class AttachedWorld : public CommWorld {
 public:
  /// No call waits for longer than this; one that does aborts the world and throws a TimeoutError
  /// that says who is missing. Without a value calls wait for as long as it takes.
  virtual void set_patience(std::optional<std::chrono::milliseconds> patience) noexcept = 0;
  /// Moves what other ranks still have on their way to this one; nothing on a backend whose calls
  /// never leave bytes under way. A rank that has left its calls
  /// in an aborted world must go on calling it until all ranks have: they do not come back from
  /// theirs before MPI has let go of their memory.
  /// Ranks   local; does not wait.
  virtual void serve() {}
  /// Called while a call of this world waits; empty: nothing.
  virtual void set_idle(std::function<void()> /*idle*/) {}
};

/// Requires     one per process; one thread at a time calls it and its worlds.
/// Guarantees   a world that is aborted or damaged does no harm to those made later, if its ranks
///              call serve() until all have left it.
///
///     const auto job = attach_mpi_job();
///     const auto world = job->make_world(ReductionOrder::kOrdered);
///     world->communicator(job->rank())->barrier({});
///     job->finish();
class AttachedJob {
 public:
  virtual ~AttachedJob() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// Ranks   collective over the job.
  [[nodiscard]] virtual std::unique_ptr<AttachedWorld> make_world(ReductionOrder order) = 0;
  /// The largest value of all processes, also after worlds were aborted.
  /// Ranks   collective over the job.
  [[nodiscard]] virtual std::uint64_t largest(std::uint64_t own) = 0;
  /// The last call: the process may end from here on.
  /// Ranks   collective over the job.
  virtual void finish() = 0;
  /// What the library below calls itself: "Open MPI v4.1.4".
  /// Ranks   local.
  [[nodiscard]] virtual std::string library() const = 0;
  /// Whether a process of the job may fork others that compute as it does: not where it has started
  /// CUDA. Equal on all processes.
  /// Ranks   local.
  [[nodiscard]] virtual bool may_fork() const noexcept { return true; }
  /// Ends all processes of the job. Their launcher hands the code on.
  /// Ranks   local.
  [[noreturn]] virtual void end_all(int code) noexcept = 0;
};

/// Joins the job that mpirun or srun started (library isoshard::comm_mpi).
///
/// Ranks    collective over all processes that the launcher started.
/// Errors   NotBuiltError in a build without MPI; UsageError where no launcher of MPI started this
///          process, or where variables of torchrun, Slurm or mpirun contradict MPI.
[[nodiscard]] std::unique_ptr<AttachedJob> attach_mpi_job();

}  // namespace isoshard
