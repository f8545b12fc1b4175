// SPDX-License-Identifier: Apache-2.0
/// Delays before collectives, so that ranks meet in another order than they usually do.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>

#include "core/comm/communicator.h"
#include "harness/fault/collective_fault.h"

namespace isoshard {

/// The longest delay before one call.
inline constexpr std::chrono::microseconds kLongestDelay{1000};

/// How long a rank waits before its `call`-th call (from 0): from 0 to kLongestDelay, evenly drawn.
/// Determinism   a function of its arguments.
[[nodiscard]] std::chrono::microseconds random_delay(std::uint64_t seed, int run, int rank,
                                                     std::uint32_t call) noexcept;

/// A "fault" that changes no call: each rank waits for random_delay before it, without sleeping,
/// and yields its core meanwhile. A subject without a race computes the same bits. Calls of
/// Purpose::kSetup are not delayed, and no call counts as fired.
[[nodiscard]] std::shared_ptr<const CollectiveFault> random_delays(std::uint64_t seed, int run);

/// Around what `inner` makes (of an empty one: around the communicator itself).
[[nodiscard]] CommDecorator with_random_delays(CommDecorator inner, std::uint64_t seed, int run);

}  // namespace isoshard
