// SPDX-License-Identifier: Apache-2.0
/// The thread backend: the ranks of a world are threads of one process; the collectives are those
/// of shm.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string_view>

#include "core/comm/transport.h"

namespace isoshard {

/// A world whose ranks are threads: for thread sanitizers and for tests of algebra.
///
/// Errors   UsageError for num_ranks outside 1..16 and for ReductionOrder::kNative, which shared
///          memory does not have.
///
///     ThreadWorld world(3);
///     world.run([](Communicator& comm) { comm.barrier({}); });
class ThreadWorld final : public CommWorld {
 public:
  explicit ThreadWorld(int num_ranks, ReductionOrder order = ReductionOrder::kOrdered);
  ~ThreadWorld() override;
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  [[nodiscard]] int size() const noexcept override;

  /// For callers with threads of their own; run() has its own ones.
  [[nodiscard]] std::unique_ptr<Communicator> communicator(int rank) override;

  /// Runs body on every rank and joins. When a rank throws, the world is aborted and the first
  /// exception is rethrown. May be called again, unless the world is aborted (CommError).
  void run(const std::function<void(Communicator&)>& body);

  /// As of ShmWorld.
  void abort(std::string_view reason) noexcept override;
  [[nodiscard]] bool is_aborted() const noexcept;
  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept;
  [[nodiscard]] const Journal& journal() const noexcept override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Worlds of threads.
[[nodiscard]] Transport thread_transport();

}  // namespace isoshard
