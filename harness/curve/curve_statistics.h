// SPDX-License-Identifier: Apache-2.0
/// The numbers that people compare loss curves by: first, last, least and mean loss, and
/// differences from a baseline.
#pragma once
#include <span>
#include <string>

#include "harness/curve/curve.h"

namespace isoshard {

/// The curve that others are compared with: ddp's, else the reference's, else the first one.
/// Requires   at least one.
[[nodiscard]] const Curve& baseline_of(std::span<const Curve> curves);

/// The table of seeds/001, line by line as it is printed there: the baseline first, then the others
/// in their order. Curves of different length are compared over the steps that both have, and a
/// line says so.
[[nodiscard]] std::string statistics_table(std::span<const Curve> curves);

}  // namespace isoshard
