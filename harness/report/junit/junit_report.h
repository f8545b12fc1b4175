// SPDX-License-Identifier: Apache-2.0
/// A report as JUnit XML, for continuous integration: one test case for each part of the report.
#pragma once
#include <string>

#include "harness/report/report.h"

namespace isoshard {

/// A case, curve, golden or experiment that is as it should be is a test case that passed. One that
/// diverges, is vacuous or conforms more weakly than required failed; one that could not be judged
/// has an error. Each has the properties `verdict`, "CONFORMS (within tolerance)", and, where they
/// are known, `strength`, `subject`, `copy_of` and `runs`.
///
/// Determinism   a function of its argument: no time, no host.
[[nodiscard]] std::string junit_of(const Report& report);

}  // namespace isoshard
