// SPDX-License-Identifier: Apache-2.0
/// Student's t distribution: how far a mean of few runs may lie from another run.
#pragma once

namespace isoshard {

/// What |T| exceeds with probability `chance`, T distributed as Student's t with `freedom` degrees.
/// Requires   freedom > 0, 0 < chance < 1.
[[nodiscard]] double student_quantile(double freedom, double chance) noexcept;

}  // namespace isoshard
