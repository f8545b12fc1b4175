// SPDX-License-Identifier: Apache-2.0
/// Names of states and of what is said to rolled copies.
#include "harness/verdict/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <utility>

#include "core/mesh/mesh_words.h"

namespace isoshard {

double AllowedRange::used_by(double value) const noexcept {
  const double middle = (least + most) / 2, half = (most - least) / 2;
  if (half > 0) return std::fabs(value - middle) / half;
  return value == middle ? 0 : HUGE_VAL;
}

double PooledComparison::least_found() const noexcept {
  if (!(scale > 0)) return HUGE_VAL;
  return std::max(1 - allowed_scale.least / scale, allowed_scale.most / scale - 1);
}

std::string_view name_of(ShiftedCopy copy) noexcept {
  switch (copy) {
    case ShiftedCopy::kRejected:
      return "rejected";
    case ShiftedCopy::kFlat:
      return "flat";
    case ShiftedCopy::kPassed:
      return "passed";
  }
  return "unknown";
}

std::string_view name_of(PoolOf pool) noexcept {
  switch (pool) {
    case PoolOf::kAll:
      return "all";
    case PoolOf::kLayer:
      return "layer";
    case PoolOf::kClass:
      return "class";
    case PoolOf::kRank:
      return "rank";
    case PoolOf::kTensor:
      return "tensor";
  }
  return "unknown";
}

std::string_view name_of(Strength strength) noexcept {
  switch (strength) {
    case Strength::kNone:
      return "none";
    case Strength::kWithinTolerance:
      return "within tolerance";
    case Strength::kExact:
      return "exact";
  }
  return "unknown";
}

std::string_view words_of_strength(const Verdict& verdict) noexcept {
  if (verdict.status != Status::kConforms || verdict.strength == Strength::kNone) return "";
  if (verdict.strength == Strength::kWithinTolerance) return name_of(verdict.strength);
  return verdict.equal_to_emulation.has_value()
             ? "exact: equal to its declared arithmetic, which is within bounds"
             : "exact: equal to its reference bit by bit";
}

std::string_view name_of(Status status) noexcept {
  switch (status) {
    case Status::kConforms:
      return "conforms";
    case Status::kDiverges:
      return "diverges";
    case Status::kIncomplete:
      return "incomplete";
    case Status::kVacuous:
      return "vacuous";
  }
  return "unknown";
}

Finding make_finding(const RecordKey& key, FindingId id, NamedValues values, NamedValues measured) {
  return make_finding(key, describe(key), id, std::move(values), std::move(measured));
}

Finding make_finding(const RecordKey& key, std::string_view place, FindingId id, NamedValues values,
                     NamedValues measured) {
  Finding finding;
  finding.key = key;
  finding.stage = stage_of(key);
  finding.id = id;
  const std::string problem = filled(row_of(id).text, values, name_of(id));
  finding.what = place.empty() ? problem : fmt::format("{}: {}", place, problem);
  finding.evidence = filled(row_of(id).more, measured, name_of(id));
  finding.values = with_short_lists(std::move(values));
  finding.measured = with_short_lists(std::move(measured));
  return finding;
}

bool is_zero(const TensorComparison& comparison) noexcept {
  const Stats& stats = comparison.stats;
  return stats.numel > 0 && stats.sum_sq_reference == 0 && stats.sum_sq_actual == 0 &&
         stats.nan_reference + stats.inf_reference + stats.nan_actual + stats.inf_actual == 0;
}

Rule rule_of_unused_axis(const std::vector<AxisWitness>& witnesses) {
  const auto found = std::ranges::find_if(witnesses, [](const AxisWitness& witness) {
    return witness.alike.has_value() && witness.is_demanded;
  });
  if (found == witnesses.end()) return {};
  return said(RuleId::kAxisWithoutWitness, {{"axis", name_of(found->axis)},
                                            {"degree", found->degree},
                                            {"first", found->alike->first},
                                            {"second", found->alike->second}});
}

void set_diverges(Verdict& verdict) {
  verdict.status = Status::kDiverges;
  verdict.strength = Strength::kNone;
  verdict.shows_too_little = false;
  verdict.rule = {};
}

std::string words_of_first(const Finding& first, const MeshShape& mesh) {
  return fmt::format("first {}{}{}", first.what, on_ranks(first.ranks, mesh),
                     first.diagnosis.empty() ? "" : "; " + first.diagnosis);
}

std::string words_of_verdict(const Verdict& verdict) {
  const std::string_view strength = words_of_strength(verdict);
  const std::string words(name_of(verdict.status));
  std::string upper;
  for (const char c : words)
    upper += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return strength.empty() ? upper : fmt::format("{} ({})", upper, strength);
}

Verdict verdict_through_record(Verdict emulation, std::int64_t num_equal) {
  emulation.equal_to_emulation = num_equal;
  if (emulation.shows_too_little) {
    emulation.status = Status::kConforms;
    emulation.shows_too_little = false;
    emulation.rule = {};
    const std::string little = std::move(emulation.reason);
    emulation.reason = fmt::format("{} tensors compared, {} of which are inconclusive alone",
                                   emulation.compared, emulation.weak);
    if (emulation.weak == 0 || emulation.parted) emulation.reason += " (" + little + ")";
  }
  emulation.would_miss =
      emulation.would_miss.empty()
          ? "nothing that the declared arithmetic does not do"
          : fmt::format("nothing that the declared arithmetic does not do; in that itself, {}",
                        emulation.would_miss);
  if (Rule unused = rule_of_unused_axis(emulation.witnesses);
      emulation.status == Status::kConforms && !unused.empty()) {
    emulation.status = Status::kVacuous;
    emulation.strength = Strength::kNone;
    emulation.reason = unused.text;
    emulation.rule = std::move(unused);
    return emulation;
  }
  if (emulation.status == Status::kConforms) emulation.strength = Strength::kExact;
  emulation.reason +=
      fmt::format("; {} tensors are bit-identical to the emulated reference", num_equal);
  return emulation;
}

}  // namespace isoshard
