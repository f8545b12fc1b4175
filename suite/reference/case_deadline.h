// SPDX-License-Identifier: Apache-2.0
/// For how long a run of a case may show no progress.
#pragma once
#include <chrono>

#include "fixtures/cases/case.h"

namespace isoshard {

/// The case's own deadline (--deadline), or one from its size: two minutes, and the time that one
/// step of the whole batch takes in one process at 0.5 GFLOP/s, which is slower than any machine
/// that the suite was seen on. Ranks show progress at least once a step (WorldOptions::deadline).
[[nodiscard]] std::chrono::milliseconds case_deadline(const Case& c);

/// `asked`, unless it is 0.
[[nodiscard]] std::chrono::milliseconds case_deadline(const Case& c,
                                                      std::chrono::milliseconds asked);

}  // namespace isoshard
