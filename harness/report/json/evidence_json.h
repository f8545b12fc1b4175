// SPDX-License-Identifier: Apache-2.0
/// What is shown beside a verdict or a curve, as JSON (docs/reference/report.md, "Evidence").
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "harness/report/report.h"

namespace isoshard {

[[nodiscard]] nlohmann::json evidence_json(const Evidence& evidence);
[[nodiscard]] nlohmann::json provenance_json(const Provenance& provenance);
[[nodiscard]] nlohmann::json schedule_json(const std::vector<ReportAction>& schedule);
/// One object for each purpose, with times in ms: that of results_*.json (docs/reference/bench.md).
[[nodiscard]] nlohmann::json collectives_json(const std::vector<ReportCollective>& rows);
/// At most 500 points of a curve, the last one among them: `steps`, `loss`, `grad_norm`, and, where
/// they are known, `allowed` and `spread` of the loss. null for a curve without steps.
[[nodiscard]] nlohmann::json points_json(const ReportCurve& item);

}  // namespace isoshard
