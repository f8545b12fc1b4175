// SPDX-License-Identifier: Apache-2.0
/// A report for programs to read: report.json, schema 2 (docs/reference/report.md,
/// docs/reference/report.schema.json).
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "harness/report/report.h"

namespace isoshard {

/// Experiments are listed among the cases. "curves" and "goldens" are there only if the report has
/// some.
/// Determinism   a function of its argument.
[[nodiscard]] nlohmann::json report_json(const Report& report);

/// One of its "cases".
[[nodiscard]] nlohmann::json case_json(const ReportCase& item);

}  // namespace isoshard
