// SPDX-License-Identifier: Apache-2.0
/// The parts of a report as JSON.
#include "harness/report/json/json_report.h"

#include <nlohmann/json.hpp>

#include "harness/report/json/evidence_json.h"
#include "harness/report/json/json_number.h"
#include "harness/report/json/verdict_json.h"

namespace isoshard {
namespace {

using nlohmann::json;

json text_or_null(const std::string& text) {
  return text.empty() ? json(nullptr) : json(text);
}

json broken_json(const std::string& name, const std::string& failure, const Rule& rule = {}) {
  return {{"case", name}, {"status", "incomplete"}, {"reason", failure}, {"rule", rule_json(rule)}};
}

json deviation_json(const CurveDeviation& d) {
  return {{"step", d.step},
          {"number", d.number},
          {"reference", json_number(d.reference)},
          {"actual", json_number(d.actual)},
          {"deviation", json_number(d.deviation)},
          {"allowed", json_number(d.allowed)},
          {"rule", d.rule}};
}

json curve_json(const ReportCurve& item) {
  if (!item.failure.empty()) return broken_json(item.name, item.failure);
  json mesh = json::object();
  for (const auto& [axis, degree] : item.curve.mesh) mesh[axis] = degree;
  json j = {{"case", item.name},
            {"subject", item.curve.subject},
            {"title", item.curve.title},
            {"copy_of", text_or_null(item.copy_of)},
            {"mesh", mesh},
            {"fault", text_or_null(item.fault)},
            {"steps", item.curve.steps.size()},
            {"status", nullptr},
            {"strength", nullptr},
            {"reason", nullptr},
            {"largest", nullptr},
            {"first", nullptr},
            {"published", json::array()},
            {"remarks", item.remarks},
            {"points", points_json(item)}};
  if (!item.verdict.has_value()) return j;
  const CurveVerdict& verdict = *item.verdict;
  j["status"] = name_of(verdict.status);
  if (verdict.strength != Strength::kNone) j["strength"] = name_of(verdict.strength);
  j["reason"] = verdict.reason;
  if (!verdict.largest.number.empty()) j["largest"] = deviation_json(verdict.largest);
  if (verdict.first.has_value()) j["first"] = deviation_json(*verdict.first);
  for (const CurveLimit& limit : verdict.published)
    j["published"].push_back({{"what", limit.what},
                              {"limit", json_number(limit.limit)},
                              {"measured", json_number(limit.measured)},
                              {"holds", limit.holds}});
  return j;
}

}  // namespace

json case_json(const ReportCase& item) {
  if (!item.verdict.has_value()) return broken_json(item.name, item.failure, item.rule);
  json j = verdict_json(*item.verdict);
  j["unmet"] = text_or_null(item.unmet);
  if (item.detection.has_value()) {
    j["detection"] = {{"as_expected", item.detection->is_right},
                      {"problem", text_or_null(item.detection->problem)}};
    if (const auto& row = item.detection->row; row.has_value())
      j["detection"]["row"] = {{"dtype", row->dtype},
                               {"alarm", row->alarm},
                               {"first_tensor", row->place},
                               {"cause", row->cause},
                               {"seconds", row->seconds}};
  }
  if (!item.schedule.empty()) j["schedule"] = schedule_json(item.schedule);
  if (item.against.empty()) return j;
  j["case"] = item.name;
  j["reference"] = item.against;
  j["fault"] = text_or_null(item.fault);
  return j;
}

json report_json(const Report& report) {
  json cases = json::array(), tables = json::array();
  for (const ReportCase& item : report.cases) cases.push_back(case_json(item));
  for (const ReportExperiment& item : report.experiments) cases.push_back(json::parse(item.json));
  for (const ComparisonTables& item : report.tables) tables.push_back(tables_json(item));
  json j = {{"schema", kReportSchema},
            {"exit_code", report.exit_code},
            {"cases", std::move(cases)},
            {"tables", std::move(tables)},
            {"notes", report.notes},
            {"environment", report.environment},
            {"provenance", provenance_json(report.provenance)}};
  for (const ReportFeature& item : report.features) {
    j["features"].push_back({{"group", item.group},
                             {"name", item.name},
                             {"cases", item.cases},
                             {"first", text_or_null(item.first)},
                             {"flags", item.flags}});
  }
  // Apart from the cases: what is judged is the same from run to run, times are not.
  for (const ReportCase& item : report.cases) {
    if (item.collective_times.empty()) continue;
    j["collective_times"].push_back(
        {{"case", item.name}, {"collectives", collectives_json(item.collective_times)}});
  }
  for (const ReportCurve& item : report.curves) j["curves"].push_back(curve_json(item));
  for (const ReportGolden& item : report.goldens)
    j["goldens"].push_back({{"name", item.name}, {"status", item.status}, {"text", item.text}});
  for (const ReportBenchmark& item : report.benchmarks)
    j["benchmarks"].push_back({{"name", item.name},
                               {"status", item.status},
                               {"text", item.text},
                               {"result", item.json.empty() ? json() : json::parse(item.json)}});
  return j;
}

}  // namespace isoshard
