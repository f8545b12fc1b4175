// SPDX-License-Identifier: Apache-2.0
/// How long it takes until a rank is told that its call is not that of the others.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "core/base/error.h"
#include "core/comm/communicator.h"

namespace isoshard {

inline constexpr int kMismatches = 100;

/// The last rank gathers where the others reduce. Microseconds from the call to its CommError.
///
/// Ranks   collective over `comm`, which is aborted afterwards.
inline std::uint64_t microseconds_to_mismatch(Communicator& comm) {
  using Clock = std::chrono::steady_clock;
  constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};
  std::vector<std::byte> data(4), all(4 * static_cast<std::size_t>(comm.size()));
  comm.barrier(kInfo);
  const auto start = Clock::now();
  try {
    const Buffer own{data.data(), 1, Dtype::kFloat32};
    if (comm.rank() == comm.size() - 1) {
      comm.all_gather(own, {all.data(), comm.size(), Dtype::kFloat32}, kInfo).wait();
    } else {
      comm.all_reduce(own, Reduction::kSum, kInfo).wait();
    }
  } catch (const TimeoutError&) {
    throw;
  } catch (const CommError&) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count());
  }
  throw InfrastructureError("two ranks whose calls differ must both fail, and one returned");
}

/// Of the slowest rank, once a world.
inline void print_mismatches(const char* backend, int num_ranks, std::vector<std::uint64_t> times) {
  std::ranges::sort(times);
  const auto at = [&](std::size_t percent) {
    return static_cast<double>(times[times.size() * percent / 100]) / 1000;
  };
  fmt::print(
      "{} {} ranks, {} worlds: a mismatch is named on every rank after {:.3f} ms (median), "
      "{:.3f} ms (95 of 100), {:.3f} ms at most\n",
      backend, num_ranks, times.size(), at(50), at(95), static_cast<double>(times.back()) / 1000);
}

}  // namespace isoshard
