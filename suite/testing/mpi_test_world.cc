// SPDX-License-Identifier: Apache-2.0
/// The world that mpirun started.
#include "suite/testing/mpi_test_world.h"

#include <mpi.h>

#include <cstdlib>

#include "core/comm/mpi/launcher.h"
#include "core/comm/mpi/mpi_job.h"

namespace isoshard {

void MpiTestWorld::attach(int expected_size) {
  start_mpi();
  check_attached_world([](const char* name) { return std::getenv(name); }, attached_rank(),
                       attached_size(), expected_size);
}

int MpiTestWorld::attached_size() {
  int size = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  return size;
}

int MpiTestWorld::attached_rank() {
  int rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  return rank;
}

MpiTestWorld::MpiTestWorld(int num_ranks, ReductionOrder order)
    : ProcessTestWorld("its lines begin with its number") {
  if (num_ranks != attached_size()) return;
  world_.emplace(order);
  communicator_ = world_->communicator(world_->rank());
}

}  // namespace isoshard
