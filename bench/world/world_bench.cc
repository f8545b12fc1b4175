// SPDX-License-Identifier: Apache-2.0
/// What one more multi-process test costs: a whole forked world with one all-reduce, against fork +
/// exit alone.
///
///     world_bench [--attach] [ROUNDS] prints median, min and max in ms and the ratio of the
///       medians; rounds are interleaved. With --attach the world's ranks are processes of mpirun,
///       and fork + exit is not measured.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/attach/bench_job.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/warm_up.h"

namespace {

using isoshard::Axis;
using isoshard::Dtype;
using isoshard::Purpose;
using isoshard::Rank;
using isoshard::Reduction;

void fork_and_exit(int size) {
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    pids.push_back(::fork());
    if (pids.back() == 0) ::_exit(0);
  }
  for (const pid_t pid : pids) ::waitpid(pid, nullptr, 0);
}

void world_with_one_all_reduce(int size) {
  const auto all_reduce = [size](Rank& rank) {
    std::vector<float> data(256, 1.0F);
    rank.comm()
        .all_reduce({reinterpret_cast<std::byte*>(data.data()), 256, Dtype::kFloat32},
                    Reduction::kSum, {Purpose::kGradReduce, Axis::kDp})
        .wait();
    if (data[255] != static_cast<float>(size)) throw std::runtime_error("wrong sum");
  };
  require_ok(
      isoshard::default_launcher().launch({.size = size, .name = "bench"}, all_reduce)->wait());
}

template <class Run>
double milliseconds(Run run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double print(const std::string& name, int size, std::vector<double> times) {
  std::ranges::sort(times);
  const double median = times[times.size() / 2];
  fmt::print("{:<28} {:>2} ranks  median {:6.2f} ms  min {:6.2f}  max {:6.2f}\n", name, size,
             median, times.front(), times.back());
  return median;
}

int run(isoshard::BenchJob& job, const std::vector<std::string>& arguments) {
  const int rounds = arguments.empty() ? 100 : std::max(1, std::atoi(arguments.front().c_str()));
  isoshard::warm_up_kernels();
  job.require_ranks(2);
  for (const int size : {2, 4}) {
    if (size > job.most_ranks()) continue;
    std::vector<double> floor;
    std::vector<double> world;
    world_with_one_all_reduce(size);
    for (int round = 0; round < rounds; ++round) {
      if (!job.is_attached()) floor.push_back(milliseconds([&] { fork_and_exit(size); }));
      world.push_back(milliseconds([&] { world_with_one_all_reduce(size); }));
    }
    if (job.is_attached()) {
      print("world with one all-reduce", size, world);
      continue;
    }
    const double floor_median = print("fork + exit", size, floor);
    const double world_median = print("world with one all-reduce", size, world);
    fmt::print("{:<28} {:>2} ranks  {:.2f}\n", "ratio", size, world_median / floor_median);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return isoshard::run_bench(argc, argv, "usage: world_bench [--attach] [ROUNDS]   e.g. 100", run);
}
