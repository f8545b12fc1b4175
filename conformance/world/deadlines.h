// SPDX-License-Identifier: Apache-2.0
/// Deadlines of worlds that shall hang, and of those that shall not.
#pragma once
#include <chrono>

namespace isoshard {

inline constexpr std::chrono::milliseconds kLongDeadline{60'000};  ///< no test may come near it
inline constexpr std::chrono::milliseconds kShortDeadline{500};

}  // namespace isoshard
