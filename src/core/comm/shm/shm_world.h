// SPDX-License-Identifier: Apache-2.0
/// The shm backend: a world of forked processes that share one sealed memfd.
#pragma once
#include <chrono>
#include <memory>
#include <string_view>

#include "core/comm/transport.h"

namespace isoshard {

/// The controller's end of a world whose ranks are forked processes.
///
/// Requires     made before the ranks are forked; lives as long as any communicator of it, in every
///              process.
/// Guarantees   nothing remains on the system, no matter how ranks or controller die (the memory
///              has no name). Memory is reserved before it is written, so a full /dev/shm or a
///              limit is an error, never a SIGBUS.
/// Errors       UsageError for num_ranks outside 1..16 and for ReductionOrder::kNative, which
///              shared memory does not have;
/// InfrastructureError if the memory cannot be had.
///
///     ShmWorld world(2);
///     world.set_deadline(std::chrono::steady_clock::now() + 30s);
///     if (fork() == 0) { auto comm = world.communicator(1); comm->barrier({}); _exit(0); }
///     ...                                  // a rank died:
///     world.abort("rank 1 was killed by SIGKILL " + world.journal().last_call_in_words(1));
class ShmWorld final : public CommWorld {
 public:
  explicit ShmWorld(int num_ranks, ReductionOrder order = ReductionOrder::kOrdered);
  ~ShmWorld() override;
  ShmWorld(const ShmWorld&) = delete;
  ShmWorld& operator=(const ShmWorld&) = delete;

  [[nodiscard]] int size() const noexcept override;

  /// The world's communicator of one rank. Ranks   local; called once, in the process that is this
  /// rank.
  [[nodiscard]] std::unique_ptr<Communicator> communicator(int rank) override;

  /// Makes every rank's pending and later collectives throw CommError(reason). The first reason
  /// given stays.
  void abort(std::string_view reason) noexcept override;
  [[nodiscard]] bool is_aborted() const noexcept;

  /// From then on waiting ranks throw TimeoutError, which says who is missing in what. May be moved
  /// while ranks wait.
  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept;

  /// Readable at any time, and after the ranks are gone.
  [[nodiscard]] const Journal& journal() const noexcept override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Worlds of shared memory.
[[nodiscard]] Transport shm_transport();

}  // namespace isoshard
