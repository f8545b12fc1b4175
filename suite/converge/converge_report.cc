// SPDX-License-Identifier: Apache-2.0
// Tables of text.
#include "suite/converge/converge_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/base/atomic_file.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/json/json_number.h"

namespace isoshard {
namespace {

using Row = std::vector<std::string>;

constexpr const char* kJsonName = "converge.json";
constexpr const char* kTextName = "converge.txt";

/// A Markdown table with columns of equal width.
std::string table_text(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t c = 0; c < rows[r].size(); ++c)
      text += fmt::format("| {:<{}} ", rows[r][c], widths[c]);
    text += "|\n";
    if (r > 0) continue;
    for (const std::size_t width : widths) text += fmt::format("|{:-<{}}", "", width + 2);
    text += "|\n";
  }
  return text;
}

std::string rules_text(std::span<const ConvergeRule> rules) {
  std::string text = "Rules of the guideline\n";
  for (const ConvergeRule& rule : rules)
    text += fmt::format("  {:<8}  {:<17}  {}\n", name_of(rule.status), rule.name, rule.sentence);
  return text;
}

std::string_view word_of(Status status) {
  switch (status) {
    case Status::kConforms:
      return "converges";
    case Status::kDiverges:
      return "diverges";
    case Status::kVacuous:
      return "vacuous";
    default:
      return "incomplete";
  }
}

/// In text, whatever does not converge is in capitals.
std::string text_word_of(Status status) {
  std::string word(word_of(status));
  if (status != Status::kConforms) std::ranges::transform(word, word.begin(), ::toupper);
  return word;
}

std::string verdict_cell(const ConvergeRun& run) {
  if (!run.judged.has_value()) return "INCOMPLETE";
  std::string cell = text_word_of(run.judged->verdict.status);
  if (run.judged->seen_from >= 0) cell += fmt::format(", seen from step {}", run.judged->seen_from);
  return cell;
}

/// The largest share of what is allowed, of any number of any step or of the whole curve.
double largest_share(const ConvergenceVerdict& judged) {
  double share = judged.verdict.largest_share;
  for (const CurveDistance& d : judged.distances)
    share = std::max(share, std::abs(d.value) / d.allowed);
  return share;
}

std::string seed_cell(const ConvergePlan& plan, std::uint64_t seed) {
  return plan.has_one_seed() ? "" : fmt::format(", seed {}", seed);
}

Row control_row(const ConvergePlan& plan, const ConvergeControl& control) {
  const Curve& curve = control.runs.trained.curve;
  return {fmt::format("1D ({} ranks)", plan.control.world_size()),
          control_title(plan.control) + seed_cell(plan, control.seed),
          curve.steps.empty() ? "-" : fmt::format("{:.6f}", final_loss(curve)),
          "-",
          "-",
          control.problem.empty() ? "the 1D control set" : "VACUOUS"};
}

Row run_row(const ConvergePlan& plan, const ConvergeRun& run) {
  const TestSet& set = plan.sets[run.set];
  Row row = {fmt::format("{}D ({} ranks)", set.dimensions, set.item.world_size()),
             set.title + seed_cell(plan, run.seed),
             run.curve.steps.empty() ? "-" : fmt::format("{:.6f}", final_loss(run.curve)),
             "-",
             "-",
             verdict_cell(run)};
  if (!run.judged.has_value() || run.judged->distances.empty()) return row;
  row[3] = fmt::format("{:.2e}", run.judged->distances.front().value);
  row[4] = fmt::format("{:.2e}", run.judged->distances.front().allowed);
  return row;
}

/// In the columns of the guideline, and what it leaves "TBA".
std::string sets_text(const ConvergePlan& plan, const ConvergeResult& result) {
  std::vector<Row> rows = {{fmt::format("Parallelism (N = {})", plan.control.degrees.dp), "Setup",
                            "Final loss", "Difference", "Allowed", "Remarks"}};
  const bool is_over_seeds = !plan.test_seeds.empty();
  for (const ConvergeControl& control : result.controls) {
    rows.push_back(control_row(plan, control));
    for (const ConvergeRun& run : result.runs) {
      if (!is_over_seeds && run.seed == control.seed) rows.push_back(run_row(plan, run));
    }
  }
  for (const ConvergeRun& run : result.runs) {
    if (is_over_seeds) rows.push_back(run_row(plan, run));
  }
  return "Convergence (final loss: mean of the last tenth of the steps; difference: root mean "
         "square over all steps)\n" +
         table_text(rows);
}

/// Runs with other seeds than their controls.
std::string seeds_text(const ConvergePlan& plan, const ConvergeResult& result) {
  std::vector<Row> rows = {
      {"Setup", "Number", "Value", "Controls' mean", "Their deviation", "Allowed", "Verdict"}};
  for (const ConvergeRun& run : result.runs) {
    if (!run.judged.has_value()) continue;
    for (const SeedDistance& d : run.judged->over_seeds)
      rows.push_back({plan.sets[run.set].title + seed_cell(plan, run.seed), d.number,
                      fmt::format("{:.6f}", d.value), fmt::format("{:.6f}", d.control),
                      fmt::format("{:.2e}", d.deviation_of), fmt::format("{:.2e}", d.allowed),
                      d.is_within() ? "within" : "OUTSIDE"});
  }
  return rows.size() == 1 ? "" : "Over seeds\n" + table_text(rows);
}

std::string numbers_text(const ConvergePlan& plan, const ConvergeResult& result) {
  std::vector<Row> rows = {
      {"Setup", "Number", "Value", "Perturbed runs", "Allowed", "Share", "Seen from"}};
  std::string missed;
  for (const ConvergeRun& run : result.runs) {
    if (!run.judged.has_value() || run.judged->distances.empty()) continue;
    const std::string title = plan.sets[run.set].title + seed_cell(plan, run.seed);
    for (const CurveDistance& d : run.judged->distances)
      rows.push_back({title, std::string(name_of(d.number)), fmt::format("{:.3e}", d.value),
                      fmt::format("{:.3e}", d.spread), fmt::format("{:.3e}", d.allowed),
                      fmt::format("{:.2f}", std::abs(d.value) / d.allowed),
                      d.seen_from < 0 ? "-" : fmt::format("step {}", d.seen_from)});
    if (run.set == 0)  // what is missed follows from the control
      missed += fmt::format(
          "A shift of the loss below {:.2e} in the last quarter of the steps would have been "
          "missed{}.\n",
          run.judged->least_shift, seed_cell(plan, run.seed));
  }
  return rows.size() == 1 ? "" : "Whole curves\n" + table_text(rows) + missed;
}

nlohmann::json rules_json(std::span<const ConvergeRule> rules) {
  nlohmann::json all = nlohmann::json::array();
  for (const ConvergeRule& rule : rules)
    all.push_back(
        {{"name", rule.name}, {"status", name_of(rule.status)}, {"sentence", rule.sentence}});
  return all;
}

nlohmann::json mesh_json(const Case& item) {
  return {{"pp", item.degrees.pp},
          {"dp", item.degrees.dp},
          {"cp", item.degrees.cp},
          {"tp", item.degrees.tp}};
}

nlohmann::json distances_json(std::span<const CurveDistance> distances) {
  nlohmann::json all = nlohmann::json::array();
  for (const CurveDistance& d : distances)
    all.push_back(
        {{"number", name_of(d.number)},
         {"value", json_number(d.value)},
         {"spread", json_number(d.spread)},
         {"allowed", json_number(d.allowed)},
         {"within", d.is_within()},
         {"seen_from", d.seen_from < 0 ? nlohmann::json() : nlohmann::json(d.seen_from)}});
  return all;
}

nlohmann::json seeds_json(std::span<const SeedDistance> distances) {
  nlohmann::json all = nlohmann::json::array();
  for (const SeedDistance& d : distances)
    all.push_back({{"number", d.number},
                   {"value", json_number(d.value)},
                   {"control", json_number(d.control)},
                   {"deviation", json_number(d.deviation_of)},
                   {"allowed", json_number(d.allowed)},
                   {"within", d.is_within()}});
  return all;
}

nlohmann::json run_json(const ConvergeRun& run) {
  nlohmann::json json = {{"seed", run.seed}, {"curve", curve_file_name(run.curve)}};
  if (!run.judged.has_value()) {
    json["status"] = "incomplete";
    json["reason"] = run.failure;
    return json;
  }
  const ConvergenceVerdict& judged = *run.judged;
  json["status"] = word_of(judged.verdict.status);
  json["reason"] = judged.verdict.reason;
  json["final_loss"] = json_number(final_loss(run.curve));
  json["largest_share"] = json_number(largest_share(judged));
  json["least_shift_seen"] = json_number(judged.least_shift);
  json["seen_from"] = judged.seen_from < 0 ? nlohmann::json() : nlohmann::json(judged.seen_from);
  json["distances"] = distances_json(judged.distances);
  json["over_seeds"] = seeds_json(judged.over_seeds);
  return json;
}

nlohmann::json sets_json(const ConvergePlan& plan, const ConvergeResult& result) {
  nlohmann::json all = nlohmann::json::array();
  for (std::size_t i = 0; i < plan.sets.size(); ++i) {
    const TestSet& set = plan.sets[i];
    nlohmann::json runs = nlohmann::json::array();
    for (const ConvergeRun& run : result.runs) {
      if (run.set == i) runs.push_back(run_json(run));
    }
    all.push_back({{"title", set.title},
                   {"test", set.text},
                   {"mesh", mesh_json(set.item)},
                   {"ranks", set.item.world_size()},
                   {"micro_batches", set.item.micro_batches},
                   {"techniques", set.techniques},
                   {"implies", implied_sets(set)},
                   {"runs", std::move(runs)}});
  }
  return all;
}

}  // namespace

std::string convergence_text(const ConvergePlan& plan, const ConvergeResult& result) {
  std::string text = rules_text(plan.rules) + "\n" + sets_text(plan, result);
  for (const std::string& part : {numbers_text(plan, result), seeds_text(plan, result)}) {
    if (!part.empty()) text += "\n" + part;
  }
  return text;
}

std::string convergence_json(const ConvergePlan& plan, const ConvergeResult& result) {
  nlohmann::ordered_json json = {{"schema", 1}, {"kind", "convergence"}};
  json["exit_code"] = result.report.exit_code;
  json["rules"] = rules_json(plan.rules);
  json["check"] = {{"status", result.check.status == Status::kConforms ? "conforms" : "diverges"},
                   {"reason", result.check.reason}};
  nlohmann::json controls = nlohmann::json::array();
  for (const ConvergeControl& control : result.controls) {
    const Curve& curve = control.runs.trained.curve;
    controls.push_back({{"seed", control.seed},
                        {"perturbed_runs", curve.perturbed_runs},
                        {"problem", control.problem},
                        {"final_loss", json_number(final_loss(curve))}});
  }
  json["control"] = {{"title", control_title(plan.control)},
                     {"mesh", mesh_json(plan.control)},
                     {"local_batch", plan.control.batch_size},
                     {"seq_length", plan.control.seq_length},
                     {"steps", plan.control.steps},
                     {"runs", std::move(controls)}};
  json["sets"] = sets_json(plan, result);
  return json.dump(1) + "\n";
}

void write_convergence(const ConvergePlan& plan, const ConvergeResult& result) {
  if (plan.folder.empty()) return;
  write_file_atomically(plan.folder / kJsonName, convergence_json(plan, result));
  write_file_atomically(plan.folder / kTextName, convergence_text(plan, result));
  for (const char* const name : {kJsonName, kTextName}) remove_old(plan.folder / name);
}

void set_aside_convergence(const ConvergePlan& plan) {
  if (plan.folder.empty()) return;
  for (const char* const name : {kJsonName, kTextName}) set_aside(plan.folder / name);
}

}  // namespace isoshard
