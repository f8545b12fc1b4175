// SPDX-License-Identifier: Apache-2.0
/// Where a report comes from.
#pragma once
#include <string>
#include <vector>

#include "harness/cli/options.h"
#include "harness/report/report.h"

namespace isoshard {

/// The command line that repeats this call without options that only say where results go, every
/// setting, and the versions of program and machine.
[[nodiscard]] Provenance provenance_of(const ParsedOptions& options);

}  // namespace isoshard
