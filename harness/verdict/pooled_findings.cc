// SPDX-License-Identifier: Apache-2.0
/// Which pool outside its bounds is named.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "core/observe/layer_name.h"
#include "harness/ids/phrase.h"
#include "harness/trace/numbers.h"
#include "harness/verdict/neighbours.h"
#include "harness/verdict/pooled.h"

namespace isoshard {
namespace {

/// A factor on everything is off everywhere by the same; one on a part is diluted in what is
/// broader.
constexpr double kNearlyAsFar = 0.85;

/// How far outside, as a multiple of what is allowed.
double excess_of(const PooledComparison& p) {
  return std::max(p.allowed_scale.used_by(p.scale), p.allowed_shift.used_by(p.shift));
}

bool is_outside_by_scale(const PooledComparison& p) {
  return !p.allowed_scale.holds(p.scale);
}

/// Whether `broad` is `part`, or has its tensors. A pool of one rank's tensors is contained only in
/// the pool of all.
bool contains(const PooledComparison& broad, const PooledComparison& part) {
  if (broad.pool == PoolOf::kAll || broad.name == part.name) return true;
  const bool is_group = broad.pool == PoolOf::kLayer || broad.pool == PoolOf::kClass;
  if (!is_group || part.pool != PoolOf::kTensor) return false;
  const auto layer = layer_in(part.first.name), own = layer_in(broad.first.name);
  if (!layer.has_value() || !own.has_value()) return false;
  return broad.pool == PoolOf::kLayer
             ? part.first.name.substr(0, layer->end) == broad.first.name.substr(0, own->end)
             : part.first.name.substr(layer->end) == broad.first.name.substr(own->end);
}

/// Whether `broad` is outside, too, by nearly the same factor or shift of all that it has.
bool explains(const PooledComparison& broad, const PooledComparison& worst) {
  if (broad.within || is_outside_by_scale(broad) != is_outside_by_scale(worst) ||
      !contains(broad, worst))
    return false;
  return is_outside_by_scale(worst) ? (broad.scale - 1) / (worst.scale - 1) >= kNearlyAsFar
                                    : broad.shift / worst.shift >= kNearlyAsFar;
}

/// Step, kind, and of optimizer states "exp_avg".
using FindingGroup = std::tuple<int, RecordKind, std::string>;

FindingGroup group_of(const PooledComparison& p) {
  return {p.first.step, p.first.kind, std::string(state_of(p.first))};
}

/// What is off on some ranks alone is off in the whole by their share of it: the rank that is the
/// farthest out, and farther off than the whole, if others are not; else the whole.
const PooledComparison* rank_behind(const PooledComparison& whole,
                                    const std::vector<PooledComparison>& pools,
                                    const FindingGroup& group) {
  const PooledComparison* rank = nullptr;
  bool others_are_right = false;
  for (const PooledComparison& p : pools) {
    if (p.pool != PoolOf::kRank || group_of(p) != group) continue;
    others_are_right |= p.within;
    if (!p.within && !explains(whole, p) && (rank == nullptr || excess_of(p) > excess_of(*rank)))
      rank = &p;
  }
  return rank != nullptr && others_are_right ? rank : &whole;
}

Cause cause_of_pool(const PooledComparison& p, const Reference& reference) {
  const Record* const record = reference.find(p.first);
  const bool is_number = p.tensors == 1 && record != nullptr &&
                         numel_of(record->layout.global_shape) == 1 && reference.has_bytes();
  if (!is_number) return {};
  NamedValues values = {{"offset", (p.scale - 1) * number_of(reference.tensor(p.first))},
                        {"scale", p.scale},
                        NamedValue::words("on_ranks", "")};
  values.push_back(NamedValue::words("or_factor", phrase(PhraseId::kOrFactor, values)));
  return make_cause(CauseId::kNumberOff, std::move(values));
}

Finding finding_of(const PooledComparison& p, const Reference& reference, std::size_t outside,
                   std::size_t judged) {
  const bool is_scale = is_outside_by_scale(p);
  const AllowedRange& allowed = is_scale ? p.allowed_scale : p.allowed_shift;
  NamedValues measured = {{"tensors", p.tensors},
                          {"scale", p.scale},
                          {"least_scale", p.allowed_scale.least},
                          {"most_scale", p.allowed_scale.most},
                          {"shift", p.shift},
                          {"least_shift", p.allowed_shift.least},
                          {"most_shift", p.allowed_shift.most},
                          {"runs", p.runs},
                          {"outside", outside},
                          {"judged", judged}};
  measured.push_back(NamedValue::words(
      "pool_size",
      phrase(p.tensors == 1 ? PhraseId::kOneTensor : PhraseId::kTensorsTogether, measured)));
  Finding finding = make_finding(p.first, fmt::format("{} (step {})", p.name, p.first.step),
                                 is_scale ? FindingId::kPoolScale : FindingId::kPoolShift,
                                 {{"pool", p.name},
                                  {is_scale ? "scale" : "shift", is_scale ? p.scale : p.shift},
                                  {"least", allowed.least},
                                  {"most", allowed.most}},
                                 std::move(measured));
  finding.stage = p.stage;
  finding.cause = cause_of_pool(p, reference);
  finding.diagnosis =
      finding.cause.id == CauseId::kNumberOff
          ? phrase(PhraseId::kCauseOf, {{"tensor", p.name}, {"cause", finding.cause.text}})
          : finding.cause.text;
  return finding;
}

}  // namespace

std::vector<Finding> pooled_findings(const std::vector<PooledComparison>& pools,
                                     const Reference& reference) {
  struct Outside {
    const PooledComparison* worst = nullptr;
    std::size_t outside = 0, judged = 0;
  };
  std::vector<std::pair<FindingGroup, Outside>> groups;
  for (const PooledComparison& p : pools) {
    const FindingGroup group = group_of(p);
    auto found = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& entry) { return entry.first == group; });
    if (found == groups.end()) found = groups.insert(groups.end(), {group, {}});
    Outside& of = found->second;
    ++of.judged;
    if (p.within) continue;
    ++of.outside;
    if (of.worst == nullptr || excess_of(p) > excess_of(*of.worst)) of.worst = &p;
  }
  std::vector<Finding> findings;
  for (const auto& [group, of] : groups) {
    if (of.worst == nullptr) continue;
    const PooledComparison* named = of.worst;
    for (const PooledComparison& p : pools) {
      if (group_of(p) != group || !explains(p, *of.worst)) continue;
      named = &p;  // pools are sorted from broad to narrow
      break;
    }
    if (named->pool == PoolOf::kAll) named = rank_behind(*named, pools, group);
    findings.push_back(finding_of(*named, reference, of.outside, of.judged));
  }
  return findings;
}

}  // namespace isoshard
