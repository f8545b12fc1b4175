// SPDX-License-Identifier: Apache-2.0
/// The attached MPI world with the interface of ThreadWorld, so that tests run on both.
#pragma once
#include "core/comm/mpi/mpi_world.h"
#include "harness/testing/process_test_world.h"

namespace isoshard {

/// A world of all processes that mpirun started. Every process runs the same tests, and makes the
/// same worlds in the same order.
///
/// Guarantees   a world of another size than the attached one runs nothing.
///
///     MpiTestWorld world(MpiTestWorld::attached_size());
///     world.run([](Communicator& comm) { comm.barrier({}); });
class MpiTestWorld : public ProcessTestWorld<MpiWorld> {
 public:
  /// Called once, before any test.
  /// Errors   UsageError if the attached world has another size.
  static void attach(int expected_size);
  [[nodiscard]] static int attached_size();
  [[nodiscard]] static int attached_rank();

  explicit MpiTestWorld(int num_ranks, ReductionOrder order = ReductionOrder::kOrdered);
};

}  // namespace isoshard
