// SPDX-License-Identifier: Apache-2.0
/// The worlds that the collectives suite runs on: threads of one process, or in a program that is
/// built with ISOSHARD_TEST_ON_MPI the processes of mpirun, or with ISOSHARD_TEST_ON_NCCL ranks
/// over NCCL or its stand-in. The tests are the same.
#pragma once

#ifdef ISOSHARD_TEST_ON_MPI
#include "suite/testing/mpi_test_world.h"
#elif defined(ISOSHARD_TEST_ON_NCCL)
#include "suite/testing/gpu/nccl_test_world.h"
#else
#include "core/comm/thread/thread_world.h"
#endif

namespace isoshard {

#ifdef ISOSHARD_TEST_ON_MPI
using TestWorld = MpiTestWorld;
/// Whether worlds of this size run in this program.
inline bool can_have_world_of(int num_ranks) {
  return num_ranks == MpiTestWorld::attached_size();
}
#elif defined(ISOSHARD_TEST_ON_NCCL)
using TestWorld = NcclTestWorld;
inline bool can_have_world_of(int num_ranks) {
  return num_ranks == NcclTestWorld::attached_size();
}
#else
using TestWorld = ThreadWorld;
inline bool can_have_world_of(int /*num_ranks*/) {
  return true;
}
#endif

}  // namespace isoshard

/// In SetUp() of tests with one size of world: another size is tested by another program.
#define ISOSHARD_SKIP_UNLESS_WORLD_OF(num_ranks)   \
  if (!::isoshard::can_have_world_of(num_ranks)) { \
    GTEST_SKIP() << "worlds of another size";      \
  }                                                \
  static_assert(true, "a semicolon follows")
