// SPDX-License-Identifier: Apache-2.0
/// The result of a convergence test in the form of the guideline's table, and as JSON.
#pragma once
#include <string>

#include "suite/converge/converge.h"

namespace isoshard {

/// Rules, the table (one row a set), the numbers of each run beside what is allowed, and what the
/// verdicts would have missed. Each line ends with a newline.
[[nodiscard]] std::string convergence_text(const ConvergePlan& plan, const ConvergeResult& result);

/// converge.json (docs/reference/converge.schema.json).
[[nodiscard]] std::string convergence_json(const ConvergePlan& plan, const ConvergeResult& result);

/// Writes converge.json and converge.txt to the plan's folder; nothing without one.
/// Errors   as write_file_atomically.
void write_convergence(const ConvergePlan& plan, const ConvergeResult& result);
/// Keeps those of an earlier run from being taken for this one's, until they are written
/// (harness/report/formats/earlier_reports.h).   Errors   as set_aside.
void set_aside_convergence(const ConvergePlan& plan);

}  // namespace isoshard
