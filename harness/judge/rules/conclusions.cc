// SPDX-License-Identifier: Apache-2.0
#include "harness/judge/rules/conclusions.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "harness/causes/view/evidence.h"
#include "harness/judge/records/presence.h"
#include "harness/judge/steps/skipped_steps.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/stage.h"
#include "harness/verdict/judged_share.h"

namespace isoshard::detail {
namespace {

// ---- admission ----

Rule ranks_missing(const Reference&, const Trace& run) {
  return missing_ranks(run);
}

Rule reference_empty(const Reference& reference, const Trace&) {
  return reference.trace().ranks.empty() ? said(RuleId::kReferenceEmpty) : Rule();
}

constexpr std::array kAdmissions = {Admission{Status::kIncomplete, ranks_missing},
                                    Admission{Status::kVacuous, reference_empty}};

// ---- conclusion ----

Conclusion not_judged(const JudgedTensors& judged) {
  return {judged.not_judged};
}

Conclusion nothing_compared(const JudgedTensors& judged) {
  if (judged.verdict.compared > 0) return {};
  return {said(RuleId::kNothingCompared)};
}

/// What is computed: settings, ids and masks may be anything.
bool is_computed(const TensorComparison& t) {
  return t.stage != Stage::kStepSettings && t.stage != Stage::kDataIds &&
         t.stage != Stage::kMasks && t.stage != Stage::kProgress && t.stats.numel > 0;
}

bool is_gradient(const TensorComparison& t) {
  return t.stage == Stage::kParameterGrad && t.stats.numel > 0;
}

/// How many tensors are of a sort, if all of these are zero on both sides; else 0.
std::int64_t num_if_all_zero(const Verdict& verdict, bool (*is_of_sort)(const TensorComparison&)) {
  std::int64_t number = 0;
  for (const TensorComparison& t : verdict.tensors) {
    if (!is_of_sort(t)) continue;
    if (!is_zero(t)) return 0;
    ++number;
  }
  return number;
}

Conclusion all_zero(const JudgedTensors& judged) {
  if (num_if_all_zero(judged.verdict, is_computed) == 0) return {};
  return {said(RuleId::kAllZero, {{"tensors", judged.verdict.compared}})};
}

Conclusion parted(const JudgedTensors& judged) {
  if (!judged.parting.has_value()) return {};
  // An emulation that was never held to a whole step of the plain run says nothing by itself.
  return {rule_of_parting(judged.run.actual, *judged.parting),
          has_whole_step_before(judged.run.reference, *judged.parting)};
}

Conclusion gradients_zero(const JudgedTensors& judged) {
  const std::int64_t gradients = num_if_all_zero(judged.verdict, is_gradient);
  if (gradients == 0) return {};
  return {said(RuleId::kGradientsZero, {{"gradients", gradients}})};
}

/// Whether a step changed a value. A master is compared with the parameter that it was made of, in
/// another dtype or layout, so their numbers count; if they are not there, it may have moved.
bool is_moved(const RankTrace& rank, const Record& before, const Record& after) {
  if (before.dtype == after.dtype && before.layout == after.layout)
    return !std::ranges::equal(before.parts, after.parts, {}, &PartStats::digest,
                               &PartStats::digest);
  const Shape& shape = after.layout.global_shape;
  const auto old = kept_boxes(rank, before, shape), now = kept_boxes(rank, after, shape);
  if (old.size() != 1 || now.size() != 1 || old[0].first.size != now[0].first.size) return true;
  return !equal(old[0].second, now[0].second);
}

/// A run whose steps were all skipped says so itself (words_of_no_step).
Conclusion nothing_moved(const JudgedTensors& judged) {
  const JudgedRun& run = judged.run;
  if (!words_of_no_step(run.reference).empty()) return {};
  std::int64_t parameters = 0;
  for (const auto& [key, held] : run.held) {
    if (stepped_parameter(key).empty()) continue;
    for (const Held& after : held) {
      const Record* const before = after.rank->find(before_step(key));
      if (before == nullptr || is_moved(*after.rank, *before, *after.record)) return {};
    }
    ++parameters;
  }
  if (parameters == 0) return {};
  return {said(RuleId::kNothingMoved, {{"parameters", parameters}})};
}

Conclusion axis_without_witness(const JudgedTensors& judged) {
  return {rule_of_unused_axis(judged.verdict.witnesses)};
}

/// The comparisons that would have let a wrong tensor pass.
Conclusion inconclusive(const JudgedTensors& judged) {
  const auto& tensors = judged.verdict.tensors;
  const auto first =
      std::ranges::find_if(tensors, [](const auto& t) { return !t.weakness.empty(); });
  if (first == tensors.end()) return {};
  return {said(RuleId::kInconclusive, {{"weak", judged.verdict.weak},
                                       {"compared", judged.verdict.compared},
                                       {"tensor", describe(first->key)},
                                       NamedValue::words("weakness", first->weakness)}),
          true};
}

Conclusion too_little(const JudgedTensors& judged) {
  return {too_little_judged(judged.verdict.tensors, judged.run.options.coarsest), true};
}

/// Rules that no emulation makes up for come first.
constexpr std::array kConclusions = {not_judged,           nothing_compared, all_zero,
                                     gradients_zero,       parted,           nothing_moved,
                                     axis_without_witness, inconclusive,     too_little};

}  // namespace

std::span<const Admission> admissions() noexcept {
  return kAdmissions;
}

Conclusion conclusion_of(const JudgedTensors& judged) {
  for (const auto& rule : kConclusions) {
    if (Conclusion conclusion = rule(judged); !conclusion.rule.empty()) return conclusion;
  }
  return {};
}

}  // namespace isoshard::detail
