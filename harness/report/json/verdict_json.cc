// SPDX-License-Identifier: Apache-2.0
/// The verdict as JSON (docs/reference/report.md).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "harness/report/json/evidence_json.h"
#include "harness/report/json/json_number.h"
#include "harness/report/json/values_json.h"
#include "harness/report/json/verdict_json.h"

namespace isoshard {
namespace {

using nlohmann::json;

json numbers(const std::vector<double>& values) {
  json list = json::array();
  for (const double value : values) list.push_back(json_number(value));
  return list;
}

json key_json(const RecordKey& key) {
  return {{"step", key.step}, {"kind", name_of(key.kind)}, {"name", key.name}, {"call", key.call}};
}

json tensor_json(const TensorComparison& t) {
  const Stats& s = t.stats;
  json j = key_json(t.key);
  j["stage"] = name_of(t.stage);
  j["level"] = name_of(t.level);
  j["within"] = t.within;
  j["numel"] = s.numel;
  j["unequal"] = s.unequal_values;
  j["nonfinite_mismatch"] = s.nonfinite_mismatch;
  j["norm_reference"] = json_number(std::sqrt(s.sum_sq_reference));
  j["norm_actual"] = json_number(std::sqrt(s.sum_sq_actual));
  j["max_abs"] = json_number(s.max_abs);
  j["max_ulp"] = json_number(s.max_ulp);
  j["relative_error"] = json_number(s.relative_error());
  j["scale"] = json_number(s.scale());
  j["cosine"] = json_number(s.cosine());
  j["allowed_relative_error"] = json_number(t.allowed_relative_error);
  j["allowed_scale_error"] = json_number(t.allowed_scale_error);
  j["allowed_absolute"] = json_number(t.allowed_absolute);
  j["insensitive"] = t.insensitive;
  j["scale_sensitivity"] = json_number(t.scale_sensitivity);
  j["rolled_error"] = json_number(t.rolled_error);
  j["rolled_copy"] = name_of(t.rolled_copy);
  j["weakness"] = t.weakness;
  j["elements"] = t.elements;
  j["unmasked_share"] = json_number(t.unmasked_share);
  j["sharded"] = t.sharded;
  j["ranks"] = t.ranks;
  if (!t.reference_values.empty()) {
    j["reference_values"] = numbers(t.reference_values);
    j["actual_values"] = numbers(t.actual_values);
  }
  return j;
}

/// Numbers and words apart, so that a reader need not look at types.
json values_json(const NamedValues& values) {
  json numbers_of_it = json::object(), words = json::object();
  for (const NamedValue& value : values) {
    if (!value.is_data) continue;
    const bool is_word = std::holds_alternative<std::string>(value.value) ||
                         std::holds_alternative<std::vector<std::string>>(value.value);
    (is_word ? words : numbers_of_it)[value.name] = value_json(value.value);
  }
  return {{"numbers", numbers_of_it}, {"words", words}};
}

template <TabledId Id>
json id_json(Id id, const NamedValues& values) {
  if (id == Id::kNone) return nullptr;
  json j = values_json(values);
  j["id"] = name_of(id);
  return j;
}

template <TabledId Id>
json id_json(const Said<Id>& said) {
  return id_json(said.id, said.values);
}

json finding_json(const Finding& f) {
  json j = key_json(f.key);
  j["stage"] = name_of(f.stage);
  j["finding"] = id_json(f.id, f.values);
  j["what"] = f.what;
  j["measured"] = values_json(f.measured);
  j["evidence"] = f.evidence;
  j["cause"] = id_json(f.cause);
  j["diagnosis"] = f.diagnosis;
  j["ranks"] = f.ranks;
  j["confirmed"] = f.confirmed;
  if (!f.call_site.empty()) j["call_site"] = f.call_site;
  return j;
}

json bound_json(const PublishedBound& bound) {
  return {{"what", bound.what},
          {"limit", json_number(bound.limit)},
          {"measured", json_number(bound.measured)},
          {"tensor", bound.tensor.empty() ? "" : describe(bound.key)},
          {"holds", bound.holds},
          {"too_wild", bound.too_wild}};
}

json range_json(const AllowedRange& range) {
  return {json_number(range.least), json_number(range.most)};
}

json pool_json(const PooledComparison& p) {
  return {{"pool", name_of(p.pool)},
          {"name", p.name},
          {"step", p.first.step},
          {"kind", name_of(p.first.kind)},
          {"stage", name_of(p.stage)},
          {"tensors", p.tensors},
          {"scale", json_number(p.scale)},
          {"allowed_scale", range_json(p.allowed_scale)},
          {"shift", json_number(p.shift)},
          {"allowed_shift", range_json(p.allowed_shift)},
          {"runs", p.runs},
          {"within", p.within}};
}

}  // namespace

json rule_json(const Rule& rule) {
  return id_json(rule);
}

json verdict_json(const Verdict& verdict) {
  json mesh = json::array();
  for (const AxisDegree& axis : verdict.mesh.axes())
    mesh.push_back({{"axis", name_of(axis.axis)}, {"degree", axis.degree}});
  json tensors = json::array();
  // In the order of execution: a recorder may see the loss when backward is over.
  std::vector<const TensorComparison*> in_order;
  for (const TensorComparison& t : verdict.tensors) in_order.push_back(&t);
  std::ranges::stable_sort(
      in_order, {}, [](const TensorComparison* t) { return std::pair(t->key.step, t->stage); });
  for (const TensorComparison* t : in_order) tensors.push_back(tensor_json(*t));
  json findings = json::array();
  for (const Finding& f : verdict.findings) findings.push_back(finding_json(f));
  json pools = json::array();
  for (const PooledComparison& p : verdict.pools) pools.push_back(pool_json(p));
  json axes = json::array();
  for (const AxisWitness& witness : verdict.witnesses)
    axes.push_back({{"axis", name_of(witness.axis)},
                    {"degree", witness.degree},
                    {"witness", witness.tensor.empty() ? json(nullptr) : json(witness.tensor)},
                    {"alike", witness.alike.has_value() ? json(*witness.alike) : json(nullptr)}});
  json published = json::array();
  for (const PublishedBound& bound : verdict.published) published.push_back(bound_json(bound));
  return {{"schema", kReportSchema},
          {"status", name_of(verdict.status)},
          {"strength",
           verdict.strength == Strength::kNone ? json(nullptr) : json(name_of(verdict.strength))},
          {"reason", verdict.reason},
          {"rule", id_json(verdict.rule)},
          {"subject", verdict.subject},
          {"copy_of", verdict.copy_of.empty() ? json(nullptr) : json(verdict.copy_of)},
          {"runs", verdict.runs},
          {"case", verdict.case_slug},
          {"mesh", mesh},
          {"axes", axes},
          {"compared", verdict.compared},
          {"weak", verdict.weak},
          {"skipped", verdict.skipped},
          {"judged",
           {{"share_of_steps", json_number(verdict.judged.of_steps)},
            {"least_share", json_number(verdict.judged.least)},
            {"least_tensor", verdict.judged.least_tensor},
            {"insensitive", verdict.judged.insensitive},
            {"insensitive_gradients", json_number(verdict.judged.insensitive_gradients)}}},
          {"equal_to_emulation",
           verdict.equal_to_emulation ? json(*verdict.equal_to_emulation) : json(nullptr)},
          {"collectives", verdict.collectives.empty() ? json(nullptr) : json(verdict.collectives)},
          {"would_miss", verdict.would_miss},
          {"published_bounds", published},
          {"pools", pools},
          {"tensors", tensors},
          {"findings", findings},
          {"evidence", evidence_json(verdict.evidence)},
          {"not_recorded", verdict.not_recorded},
          {"notes", verdict.notes},
          {"zero_tensors", verdict.zero_tensors},
          {"constant_parameters", verdict.constant_parameters},
          {"missing", verdict.missing},
          {"extra", verdict.extra}};
}

}  // namespace isoshard
