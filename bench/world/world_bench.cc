// SPDX-License-Identifier: Apache-2.0
/// What one more multi-process test costs: a whole forked world with one all-reduce, against fork +
/// exit alone.
///
///     world_bench [ROUNDS] prints median, min and max in ms and the ratio of the medians; rounds
///       are interleaved.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

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
  require_ok(isoshard::run_forked({.size = size, .name = "bench"}, [size](Rank& rank) {
    std::vector<float> data(256, 1.0F);
    rank.comm()
        .all_reduce({reinterpret_cast<std::byte*>(data.data()), 256, Dtype::kFloat32},
                    Reduction::kSum, {Purpose::kGradReduce, Axis::kDp})
        .wait();
    if (data[255] != static_cast<float>(size)) throw std::runtime_error("wrong sum");
  }));
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

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 100;
  isoshard::make_controller();
  isoshard::warm_up_kernels();
  for (const int size : {2, 4}) {
    std::vector<double> floor;
    std::vector<double> world;
    world_with_one_all_reduce(size);
    for (int round = 0; round < rounds; ++round) {
      floor.push_back(milliseconds([&] { fork_and_exit(size); }));
      world.push_back(milliseconds([&] { world_with_one_all_reduce(size); }));
    }
    const double floor_median = print("fork + exit", size, floor);
    const double world_median = print("world with one all-reduce", size, world);
    fmt::print("{:<28} {:>2} ranks  {:.2f}\n", "ratio", size, world_median / floor_median);
  }
}
