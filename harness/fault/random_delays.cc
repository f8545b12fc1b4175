// SPDX-License-Identifier: Apache-2.0
/// Delays drawn from Philox by seed, run, rank and call.
#include "harness/fault/random_delays.h"

#include <array>
#include <atomic>
#include <thread>
#include <utility>

#include "core/base/philox.h"

namespace isoshard {
namespace {

void wait_without_sleeping(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

class RandomDelays final : public CollectiveFault {
 public:
  RandomDelays(std::uint64_t seed, int run) : seed_(seed), run_(run) {}
  bool applies(const InterceptedCall&) const override { return true; }
  Work apply(const InterceptedCall& call) const override {
    *call.acted = false;
    const int rank = call.comm->world_rank_of(call.comm->rank());
    // Of this process, or, where ranks are threads, of all of them.
    const std::uint32_t number = calls_.at(static_cast<std::size_t>(rank))++;
    wait_without_sleeping(random_delay(seed_, run_, rank, number));
    return call.pass();
  }

 private:
  static constexpr std::size_t kMostRanks = 64;
  std::uint64_t seed_;
  int run_;
  mutable std::array<std::atomic<std::uint32_t>, kMostRanks> calls_{};
};

}  // namespace

std::chrono::microseconds random_delay(std::uint64_t seed, int run, int rank,
                                       std::uint32_t call) noexcept {
  const auto low = static_cast<std::uint32_t>(seed), high = static_cast<std::uint32_t>(seed >> 32);
  const std::uint32_t drawn = philox4x32(
      {call, static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(run), 0}, {low, high})[0];
  return std::chrono::microseconds(drawn % (kLongestDelay.count() + 1));
}

std::shared_ptr<const CollectiveFault> random_delays(std::uint64_t seed, int run) {
  return std::make_shared<RandomDelays>(seed, run);
}

CommDecorator with_random_delays(CommDecorator inner, std::uint64_t seed, int run) {
  return [inner = std::move(inner), delays = random_delays(seed, run)](
             std::unique_ptr<Communicator> comm, int rank) {
    if (inner) comm = inner(std::move(comm), rank);
    return decorate_with_fault(std::move(comm), delays, FaultProbe());
  };
}

}  // namespace isoshard
