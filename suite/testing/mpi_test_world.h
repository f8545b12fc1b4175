// SPDX-License-Identifier: Apache-2.0
/// The attached MPI world with the interface of ThreadWorld, so that tests run on both.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/comm/mpi/mpi_world.h"

namespace isoshard {

/// A world of all processes that mpirun started. Every process runs the same tests, and makes the
/// same worlds in the same order.
///
/// Guarantees   a world of another size than the attached one runs nothing. When run() returns, all
///              ranks have, the journal is exact for all ranks, and a test that failed on one rank
///              has failed on all.
///
///     MpiTestWorld world(MpiTestWorld::attached_size());
///     world.run([](Communicator& comm) { comm.barrier({}); });
class MpiTestWorld {
 public:
  /// Called once, before any test.
  /// Errors   UsageError if the attached world has another size.
  static void attach(int expected_size);
  [[nodiscard]] static int attached_size();
  [[nodiscard]] static int attached_rank();
  /// How often run() has run a body in this process.
  [[nodiscard]] static int num_runs();

  explicit MpiTestWorld(int num_ranks, ReductionOrder order = ReductionOrder::kOrdered);

  /// Runs body on this process's rank, waits for the others, and rethrows what body throws, which
  /// also aborts the world.
  void run(const std::function<void(Communicator&)>& body);

  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept;
  [[nodiscard]] bool is_aborted() const noexcept;
  [[nodiscard]] const Journal& journal() const noexcept;

 private:
  std::optional<MpiWorld> world_;  ///< none if the size is another one
  std::unique_ptr<Communicator> communicator_;
  std::vector<std::byte> empty_memory_;
  Journal empty_;
};

}  // namespace isoshard
