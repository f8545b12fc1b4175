// SPDX-License-Identifier: Apache-2.0
/// The exit codes that docs/reference/report.md promises, written down once more.
#pragma once

namespace isoshard::codes {

inline constexpr int kConforms = 0, kDiverges = 1, kUsage = 2, kBadInput = 3, kIncomplete = 4,
                     kInfrastructure = 4;

}  // namespace isoshard::codes
