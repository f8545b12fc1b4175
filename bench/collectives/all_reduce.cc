// SPDX-License-Identifier: Apache-2.0
/// Time of an ordered all-reduce over forked ranks: one line per dtype, ranks and size, with the
/// median and the best of many.
///
/// Usage: bench_all_reduce [RANKS...]     default 2 4
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bench/attach/refuse_attach.h"
#include "core/comm/shm/shm_world.h"

namespace isoshard {
namespace {

using Clock = std::chrono::steady_clock;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};
constexpr std::int64_t kSizes[] = {1 << 10, 16 << 10, 64 << 10, 256 << 10,
                                   1 << 20, 4 << 20,  16 << 20, 64 << 20};
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kBFloat16};

struct Result {
  double median_ms;
  double best_ms;
};
constexpr std::size_t kNumResults = std::size(kSizes) * std::size(kDtypes);

// Each repetition starts with a barrier and is timed by rank 0, which ends with the last rank's
// slice.
Result measure(Communicator& comm, Dtype dtype, std::int64_t bytes) {
  const auto repetitions = std::clamp<std::int64_t>((std::int64_t{256} << 20) / bytes, 9, 2000);
  std::vector<std::byte> data(static_cast<std::size_t>(bytes), std::byte{0});
  const Buffer buffer{data.data(), bytes / static_cast<std::int64_t>(size_of(dtype)), dtype};
  std::vector<double> times_ms;
  for (std::int64_t repetition = -3; repetition < repetitions; ++repetition) {
    comm.barrier(kInfo);
    const auto start = Clock::now();
    comm.all_reduce(buffer, Reduction::kSum, kInfo).wait();
    const double time_ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    if (repetition >= 0) times_ms.push_back(time_ms);
  }
  std::ranges::sort(times_ms);
  return {times_ms[times_ms.size() / 2], times_ms.front()};
}

int run(int num_ranks) {
  auto* const results =
      static_cast<Result*>(mmap(nullptr, kNumResults * sizeof(Result), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto start = Clock::now();
  ShmWorld world(num_ranks);
  const double creation_ms =
      std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  world.set_deadline(Clock::now() + std::chrono::minutes(5));
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (fork() != 0) continue;
    int code = 1;
    try {
      const auto comm = world.communicator(rank);
      std::size_t index = 0;
      for (const Dtype dtype : kDtypes) {
        for (const std::int64_t bytes : kSizes) {
          const Result result = measure(*comm, dtype, bytes);
          if (rank == 0) results[index] = result;
          ++index;
        }
      }
      code = 0;
    } catch (const std::exception& error) {
      fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    }
    _exit(code);
  }
  int failures = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    ++failures;
    world.abort("another rank failed");
  }
  fmt::print("{} ranks: world created in {:.3f} ms\n", num_ranks, creation_ms);
  std::size_t index = 0;
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t bytes : kSizes) {
      const Result& result = results[index++];
      fmt::print("isoshard {} ranks {} {:>6} KiB  median {:>8.4f} ms  best {:>8.4f} ms\n",
                 num_ranks, name_of(dtype), bytes >> 10, result.median_ms, result.best_ms);
    }
  }
  return failures;
}

}  // namespace
}  // namespace isoshard

int main(int argc, char** argv) {
  isoshard::refuse_attach(argc, argv, "usage: bench_all_reduce [RANKS...]   e.g. 2 4",
                          "it measures shm, which joins forked ranks; for processes of mpirun take "
                          "bench_mpi_backend_all_reduce");
  std::vector<int> ranks;
  for (int i = 1; i < argc; ++i) ranks.push_back(std::atoi(argv[i]));
  if (ranks.empty()) ranks = {2, 4};
  int failures = 0;
  for (const int num_ranks : ranks) failures += isoshard::run(num_ranks);
  return failures == 0 ? 0 : 4;
}
