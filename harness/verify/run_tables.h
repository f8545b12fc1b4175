// SPDX-License-Identifier: Apache-2.0
/// Runs side by side, from what their verdicts say.
#pragma once
#include <string>
#include <vector>

#include "harness/report/report.h"

namespace isoshard {

/// A column of the reference and one of each run that was judged: losses, norms of outputs and
/// gradients, and how far they are from the reference, all of the first step.
[[nodiscard]] ComparisonTables tables_of(const std::string& title,
                                         const std::vector<ReportCase>& cases);

}  // namespace isoshard
