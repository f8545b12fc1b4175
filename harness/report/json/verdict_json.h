// SPDX-License-Identifier: Apache-2.0
/// A verdict and tables as JSON (docs/report.md). NaN and infinities, which JSON does not have, are
/// strings.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "harness/report/tables.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

[[nodiscard]] nlohmann::json verdict_json(const Verdict& verdict);
[[nodiscard]] nlohmann::json tables_json(const ComparisonTables& tables);

}  // namespace isoshard
