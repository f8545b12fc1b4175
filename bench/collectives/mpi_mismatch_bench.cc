// SPDX-License-Identifier: Apache-2.0
/// Time until the processes of mpirun are told that one of them made another call.
///
///     mpirun -n RANKS --oversubscribe --bind-to none --mca mpi_yield_when_idle 1
///     bench_mpi_mismatch
#include <string_view>

#include "bench/collectives/mismatch_time.h"
#include "core/comm/attached_job.h"

int main(int argc, char** argv) {
  using namespace isoshard;
  if (argc > 1 && std::string_view(argv[1]) == "--help") {
    fmt::print(
        "usage: mpirun -n RANKS bench_mpi_mismatch\nIts ranks are those of mpirun without "
        "--attach.\n");
    return 0;
  }
  const auto job = attach_mpi_job();
  std::vector<std::uint64_t> times;
  for (int i = 0; i < kMismatches; ++i) {
    const auto world = job->make_world(ReductionOrder::kOrdered);
    const auto comm = world->communicator(job->rank());
    times.push_back(job->largest(microseconds_to_mismatch(*comm)));
  }
  if (job->rank() == 0) print_mismatches("mpi", job->size(), std::move(times));
  job->finish();
}
