// SPDX-License-Identifier: Apache-2.0
/// The mpi backend: the ranks of a world are the processes that mpirun or srun started.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "core/comm/attached_job.h"

namespace isoshard {

/// This process's end of the world that a launcher made. A process may make several, one after the
/// other, each of which holds two communicators of MPI until the process ends.
///
/// Requires     libraries built with MPI; one thread at a time calls its communicators.
/// Guarantees   journal() is exact for this rank. Of others it holds the calls that they made with
///              this rank, the one in which they last waited for 2 ms and more, and all as of the
///              last gather_journals().
/// Errors       UsageError for more than 1024 ranks, and as attach_mpi_world.
/// Ranks        the constructor is collective over the world.
class MpiWorld final : public AttachedWorld {
 public:
  explicit MpiWorld(ReductionOrder order = ReductionOrder::kOrdered);
  ~MpiWorld() override;
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  [[nodiscard]] int size() const noexcept override;
  /// Of this process.
  [[nodiscard]] int rank() const noexcept;
  /// Errors   UsageError for another rank than this process's.
  /// Ranks    with order native collective over the world, otherwise local.
  [[nodiscard]] std::unique_ptr<Communicator> communicator(int rank) override;
  /// The first reason given stays; ranks that abort at the same time may report their own.
  void abort(std::string_view reason) noexcept override;
  [[nodiscard]] bool is_aborted() const noexcept;
  /// Of this process's clock; a rank that comes to it aborts the world.
  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept;
  void set_patience(std::optional<std::chrono::milliseconds> patience) noexcept override;
  void serve() override;
  void set_idle(std::function<void()> idle) override;
  [[nodiscard]] const Journal& journal() const noexcept override;
  /// Makes the journal exact for all ranks, and returns the largest `word` of all ranks, which
  /// saves tests an exchange. Ranks    collective over the world, also after an abort; none may be
  /// in a collective.
  std::uint64_t gather_journals(std::uint64_t word = 0);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isoshard
