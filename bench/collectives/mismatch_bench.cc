// SPDX-License-Identifier: Apache-2.0
/// Time until forked ranks are told that one of them made another call.
///
/// Usage: bench_mismatch [RANKS...]     default 2 4
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "bench/collectives/mismatch_time.h"
#include "core/comm/shm/shm_world.h"

namespace isoshard {
namespace {

int run(int num_ranks) {
  const std::size_t bytes = sizeof(std::uint64_t) * static_cast<std::size_t>(num_ranks);
  auto* const of_ranks = static_cast<std::uint64_t*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (of_ranks == MAP_FAILED) return 4;
  std::vector<std::uint64_t> times;
  for (int i = 0; i < kMismatches; ++i) {
    ShmWorld world(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (fork() != 0) continue;
      try {
        of_ranks[rank] = microseconds_to_mismatch(*world.communicator(rank));
        _exit(0);
      } catch (...) {
        _exit(4);
      }
    }
    for (int status = 0, left = num_ranks; left > 0; --left) {
      if (wait(&status) < 0 || status != 0) return 4;
    }
    times.push_back(*std::max_element(of_ranks, of_ranks + num_ranks));
  }
  munmap(of_ranks, bytes);
  print_mismatches("shm", num_ranks, std::move(times));
  return 0;
}

}  // namespace
}  // namespace isoshard

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "--help") {
    fmt::print(
        "usage: bench_mismatch [RANKS...]     default 2 4\n"
        "It forks its ranks; under mpirun take bench_mpi_mismatch instead of --attach.\n");
    return 0;
  }
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {2, 4};
  for (const int size : sizes) {
    if (size < 2 || size > 16) {
      fmt::print(stderr, "RANKS must be from 2 to 16, got {}\n", size);
      return 2;
    }
    if (const int code = isoshard::run(size); code != 0) return code;
  }
}
