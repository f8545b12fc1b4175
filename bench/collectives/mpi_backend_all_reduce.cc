// SPDX-License-Identifier: Apache-2.0
/// Time of an all-reduce of fp32 on the mpi backend, in order ordered and in order native: one line
/// per size, medians in ms.
///
///     mpirun -n RANKS --oversubscribe --bind-to none --mca mpi_yield_when_idle 1
///       bench_mpi_backend_all_reduce [--attach]   which changes nothing
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <vector>

#include "core/comm/backend.h"
#include "core/comm/mpi/mpi_world.h"

namespace isoshard {
namespace {

using Clock = std::chrono::steady_clock;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};
constexpr std::int64_t kSizes[] = {1 << 10, 16 << 10, 64 << 10, 256 << 10,
                                   1 << 20, 4 << 20,  16 << 20, 64 << 20};

double median_ms(Communicator& comm, std::int64_t bytes) {
  const auto repetitions = std::clamp<std::int64_t>((std::int64_t{64} << 20) / bytes, 7, 500);
  std::vector<std::byte> data(static_cast<std::size_t>(bytes), std::byte{0});
  const Buffer buffer{data.data(), bytes / 4, Dtype::kFloat32};
  std::vector<double> times;
  for (std::int64_t repetition = -3; repetition < repetitions; ++repetition) {
    comm.barrier(kInfo);
    const auto start = Clock::now();
    comm.all_reduce(buffer, Reduction::kSum, kInfo).wait();
    if (repetition >= 0)
      times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::ranges::nth_element(times, times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2));
  return times[times.size() / 2];
}

}  // namespace
}  // namespace isoshard

int main(int argc, char** argv) {
  using namespace isoshard;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) != "--help") continue;
    fmt::print(
        "usage: mpirun -n RANKS bench_mpi_backend_all_reduce [--attach]   its ranks are "
        "always processes of mpirun\n");
    return 0;
  }
  MpiWorld ordered_world(ReductionOrder::kOrdered), native_world(ReductionOrder::kNative);
  const auto ordered = ordered_world.communicator(ordered_world.rank());
  const auto native = native_world.communicator(native_world.rank());
  for (const std::int64_t bytes : kSizes) {
    const double ordered_ms = median_ms(*ordered, bytes), native_ms = median_ms(*native, bytes);
    if (ordered->rank() == 0)
      fmt::print("{} ranks fp32 {:>6} KiB  mpi ordered {:>9.4f} ms  mpi native {:>9.4f} ms\n",
                 ordered->size(), bytes >> 10, ordered_ms, native_ms);
  }
}
