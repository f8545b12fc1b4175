// SPDX-License-Identifier: Apache-2.0
// Tables as JSON (docs/reference/report.md).
#include <cmath>
#include <nlohmann/json.hpp>

#include "harness/report/json/json_number.h"
#include "harness/report/json/verdict_json.h"

namespace isoshard {
namespace {

using nlohmann::json;

json difference_json(const Difference& d) {
  if (d.numel == 0) return nullptr;
  return {{"numel", d.numel},
          {"max_abs", json_number(d.max_abs)},
          {"max_abs_by_norm", json_number(d.max_abs_by_norm())},
          {"relative_error", json_number(d.relative())}};
}

json module_difference_json(const std::map<std::string, ModuleDifference>& differences,
                            const std::string& name) {
  const auto found = differences.find(name);
  if (found == differences.end()) return nullptr;
  return {{"elements", found->second.whole_of},
          {"all", difference_json(found->second.whole)},
          {"first", difference_json(found->second.first)}};
}

json gradients_json(const std::optional<GradientComparison>& g) {
  if (!g.has_value()) return nullptr;
  return {{"parameters", g->parameters},
          {"max_abs", json_number(g->max_abs)},
          {"max_abs_name", g->max_abs_name},
          {"mean_abs", json_number(g->mean_abs)},
          {"mean_relative", json_number(g->mean_relative)},
          {"max_relative", json_number(g->max_relative)},
          {"max_relative_name", g->max_relative_name}};
}

json norm_json(const std::map<std::string, double>& norms, const std::string& name) {
  const auto found = norms.find(name);
  return found == norms.end() ? json(nullptr) : json_number(found->second);
}

json losses_json(const TableColumn& column, const TableColumn* baseline) {
  json losses = json::array();
  for (std::size_t r = 0; r < column.losses.size(); ++r) {
    json relative = nullptr;
    if (baseline != nullptr && r < baseline->losses.size())
      relative = json_number(std::fabs(column.losses[r] - baseline->losses[r]) /
                             std::fabs(baseline->losses[r]));
    losses.push_back({{"dp_rank", r},
                      {"loss", json_number(column.losses[r])},
                      {"relative_to_baseline", std::move(relative)}});
  }
  return losses;
}

json norms_json(const std::map<std::string, double>& norms) {
  json object = json::object();
  for (const auto& [name, norm] : norms) object[name] = json_number(norm);
  return object;
}

json local_json(const TableColumn& column) {
  if (column.local.outputs.empty()) return nullptr;
  return {{"output_norms", norms_json(column.local.outputs)},
          {"output_gradient_norms", norms_json(column.local.output_gradients)},
          {"parameter_gradient_norms", norms_json(column.local.parameter_gradients)},
          {"sharded_parameters", column.local.sharded},
          {"sharded_from_baseline", gradients_json(column.local_from_baseline_sharded)},
          {"whole_from_baseline", gradients_json(column.local_from_baseline_whole)}};
}

json same_bits_json(const std::optional<SameBits>& same) {
  if (!same.has_value()) return nullptr;
  return {{"as", same->as},
          {"outputs", same->outputs},
          {"outputs_of", same->outputs_of},
          {"output_gradients", same->output_gradients},
          {"output_gradients_of", same->output_gradients_of},
          {"different", same->different}};
}

json column_json(const ComparisonTables& tables, const TableColumn& column) {
  json modules = json::array();
  for (const std::string& name : tables.modules) {
    modules.push_back({{"name", name},
                       {"output_norm", norm_json(column.output_norms, name)},
                       {"gradient_norm", norm_json(column.gradient_norms, name)},
                       {"from_reference", module_difference_json(column.from_reference, name)},
                       {"from_baseline", module_difference_json(column.from_baseline, name)}});
  }
  return {{"title", column.title},
          {"case", column.case_slug.empty() ? json(nullptr) : json(column.case_slug)},
          {"losses", losses_json(column, tables.find(tables.baseline))},
          {"modules", std::move(modules)},
          {"parameter_gradient_norms", norms_json(column.parameter_gradient_norms)},
          {"local", local_json(column)},
          {"same_bits", same_bits_json(column.same_bits)},
          {"gradients_from_reference", gradients_json(column.gradients_from_reference)},
          {"gradients_from_baseline", gradients_json(column.gradients_from_baseline)}};
}

}  // namespace

json tables_json(const ComparisonTables& tables) {
  json columns = json::array();
  for (const TableColumn& column : tables.columns) columns.push_back(column_json(tables, column));
  return {{"title", tables.title},
          {"baseline", tables.baseline.empty() ? json(nullptr) : json(tables.baseline)},
          {"first_elements", kListedElements},
          {"columns", std::move(columns)}};
}

}  // namespace isoshard
