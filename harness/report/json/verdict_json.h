// SPDX-License-Identifier: Apache-2.0
/// A verdict and tables as JSON (docs/reference/report.md). NaN and infinities, which JSON does not
/// have, are strings.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "harness/report/tables.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// {"id", "numbers", "words"}; null without a rule.
[[nodiscard]] nlohmann::json rule_json(const Rule& rule);
[[nodiscard]] nlohmann::json verdict_json(const Verdict& verdict);
[[nodiscard]] nlohmann::json tables_json(const ComparisonTables& tables);

}  // namespace isoshard
