// SPDX-License-Identifier: Apache-2.0
/// The table of patterns and the search for the likely cause.
#include "harness/causes/diagnosis.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <utility>

#include "core/base/error.h"
#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"

namespace isoshard::detail {
namespace {

using Kinds = unsigned;

constexpr Kinds bit(RecordKind kind) {
  return 1U << static_cast<unsigned>(kind);
}
constexpr Kinds kAny = ~0U, kParam = bit(RecordKind::kParam), kGrad = bit(RecordKind::kGrad),
                kActivation = bit(RecordKind::kActivation),
                kActivationGrad = bit(RecordKind::kActivationGrad),
                kOptimizer = bit(RecordKind::kOptimizer), kScalar = bit(RecordKind::kScalar),
                kDataId = bit(RecordKind::kDataId), kMask = bit(RecordKind::kMask),
                kTensor = kParam | kGrad | kActivation | kActivationGrad | kOptimizer,
                kNumber = kTensor | kScalar;

/// What must be there before a pattern is tried.
enum class Needs : unsigned char {
  kNothing,  ///< statistics do
  kRecord,   ///< the reference's record of the tensor
  kBytes,    ///< also what some rank holds of it, as a box
};

struct Pattern {
  Kinds kinds;  ///< of the records that it says something of
  Needs needs;
  Claim first;  ///< the first claim that its causes may make
  Cause (*cause)(const Evidence&);
};

/// By their first claim. A cause with an earlier claim wins wherever its row is.
constexpr Pattern kPatterns[] = {
    {kAny, Needs::kNothing, Claim::kFact, cause_without_forward},
    {kAny, Needs::kNothing, Claim::kFact, cause_mixed_dtypes},
    {kScalar, Needs::kRecord, Claim::kFact, cause_flag},
    {kParam | kOptimizer, Needs::kRecord, Claim::kFact, cause_not_skipped},
    {kParam, Needs::kBytes, Claim::kFact, cause_of_untrained},
    {kAny, Needs::kRecord, Claim::kFact, cause_in_progress},
    {kOptimizer, Needs::kBytes, Claim::kFact, cause_in_hyperparameters},
    {kOptimizer, Needs::kRecord, Claim::kFact, cause_in_dtype},
    {kDataId, Needs::kBytes, Claim::kFact, cause_in_samples},
    {kDataId, Needs::kRecord, Claim::kFact, cause_in_data},
    {kScalar, Needs::kBytes, Claim::kFact, cause_in_loss_scale},
    {kDataId, Needs::kRecord, Claim::kCounted, cause_sample_ids},
    {kParam, Needs::kRecord, Claim::kSameBytes, cause_not_updated},
    {kAny, Needs::kRecord, Claim::kSameBytes, cause_in_loading},
    {kParam, Needs::kRecord, Claim::kSameBytes, cause_in_shards},
    {kNumber, Needs::kBytes, Claim::kSameBytes, cause_stale},
    {kOptimizer, Needs::kRecord, Claim::kSameBytes, cause_state_as_before},
    {kAny, Needs::kRecord, Claim::kSameBytes, cause_in_order_of_parts},
    {kScalar | kActivationGrad, Needs::kRecord, Claim::kOtherSource, cause_rounded_exponentials},
    {kMask, Needs::kRecord, Claim::kOtherSource, cause_in_masks},
    {kMask, Needs::kBytes, Claim::kOtherSource, cause_other_masks},
    {kTensor, Needs::kBytes, Claim::kOtherSource, cause_rounding},
    {kGrad, Needs::kRecord, Claim::kOtherSource, cause_rounded_sums},
    {kGrad, Needs::kRecord, Claim::kOtherSource, cause_rounded_between},
    {kGrad, Needs::kBytes, Claim::kOtherSource, cause_reciprocal},
    {kParam, Needs::kBytes, Claim::kOtherSource, cause_cut_off_master},
    {kGrad | kParam, Needs::kBytes, Claim::kOtherSource, cause_in_other_gradients},
    {kTensor, Needs::kBytes, Claim::kOtherSource, cause_other_ranks},
    {kActivation | kActivationGrad | kParam | kOptimizer, Needs::kBytes, Claim::kOtherSource,
     cause_other_tensor},
    {kGrad, Needs::kBytes, Claim::kOtherSource, cause_largest_part},
    {kScalar, Needs::kRecord, Claim::kRule, cause_in_targets},
    {kScalar, Needs::kRecord, Claim::kRule, cause_in_rank_means},
    {kScalar, Needs::kRecord, Claim::kRule, cause_backward_parts},
    {kScalar, Needs::kBytes, Claim::kRule, cause_smoothed_columns},
    {kScalar, Needs::kBytes, Claim::kRule, cause_in_split_loss},
    {kScalar, Needs::kRecord, Claim::kRule, cause_sample_weights},
    {kScalar, Needs::kRecord, Claim::kRule, cause_in_scalars},
    {kParam | kOptimizer, Needs::kBytes, Claim::kRule, cause_weight_decay},
    {kParam, Needs::kBytes, Claim::kRule, cause_in_update},
    {kParam | kOptimizer, Needs::kBytes, Claim::kRule, cause_in_rule},
    {kParam, Needs::kBytes, Claim::kRule, cause_of_own_matrices},
    {kOptimizer, Needs::kBytes, Claim::kRule, cause_in_moments},
    {kGrad, Needs::kBytes, Claim::kRule, cause_in_buffer},
    {kActivation, Needs::kBytes, Claim::kRule, cause_in_weights_read},
    {kActivation, Needs::kRecord, Claim::kRule, cause_in_causal_mask},
    {kActivationGrad, Needs::kBytes, Claim::kRule, cause_in_weights_of_backward},
    {kGrad | kActivation, Needs::kBytes, Claim::kRule, cause_vocabulary_rows},
    {kActivationGrad, Needs::kBytes, Claim::kRule, cause_uncounted_tokens},
    {kActivationGrad, Needs::kBytes, Claim::kRule, cause_logit_rows},
    {kTensor, Needs::kBytes, Claim::kRule, cause_changed_part},
    {kGrad, Needs::kBytes, Claim::kRule, cause_in_micro_batches},
    {kNumber, Needs::kBytes, Claim::kRule, cause_rank_local},
    {kTensor, Needs::kBytes, Claim::kRule, cause_mean_of_shards},
    {kTensor, Needs::kBytes, Claim::kRule, cause_rank_factors},
    {kNumber, Needs::kNothing, Claim::kRule, cause_scale},
    {kGrad, Needs::kBytes, Claim::kRule, cause_in_rows},
    {kNumber, Needs::kBytes, Claim::kRule, cause_offset},
    {kActivation, Needs::kRecord, Claim::kRule, cause_in_key_order},
    {kActivationGrad, Needs::kRecord, Claim::kRule, cause_own_queries},
    {kActivation, Needs::kRecord, Claim::kRule, cause_in_tokens},
    {kActivation, Needs::kBytes, Claim::kRule, cause_in_rotation},
    {kActivation, Needs::kRecord, Claim::kRule, cause_in_scores},
    {kActivation | kActivationGrad, Needs::kRecord, Claim::kRule, cause_in_handover},
    {kParam | kOptimizer, Needs::kBytes, Claim::kFittedNumber, cause_part_not_updated},
    {kGrad, Needs::kBytes, Claim::kFittedNumbers, cause_not_cleared},
    {kActivation, Needs::kBytes, Claim::kFittedNumbers, cause_summands},
    {kTensor, Needs::kBytes, Claim::kFittedPart, cause_zeros},
    {kAny, Needs::kBytes, Claim::kRearranged, cause_moved_slices},
    {kTensor, Needs::kBytes, Claim::kRearranged, cause_part_differs},
    {kAny, Needs::kBytes, Claim::kScattered, cause_same_values_elsewhere},
    {kParam, Needs::kRecord, Claim::kPlace, cause_in_places},
    {kTensor, Needs::kBytes, Claim::kPlace, cause_wrong_part},
    {kScalar, Needs::kBytes, Claim::kPlace, cause_number_off},
    {kAny, Needs::kRecord, Claim::kDifference, cause_differing_copies},
};

static_assert(std::ranges::is_sorted(kPatterns, {}, &Pattern::first));

/// A pattern whose tensors do not fit each other does not fit: a verdict must not be lost by the
/// search for its cause.
Cause cause_by(const Pattern& pattern, const Evidence& e) {
  try {
    return pattern.cause(e);
  } catch (const ShapeError&) {
    return {};
  } catch (const std::out_of_range&) {
    return {};
  }
}

Cause cause_of(const Evidence& e, FittingPatterns& fitting) {
  if (e.result.findings.empty() || e.bad_ranks().empty()) return {};
  if (const auto count = e.result.comparison.stats.nonfinite_mismatch; count != 0)
    return make_cause(CauseId::kValuesNotFinite, {{"num_values", count}});
  // what stands for a record that the reference has not: its values are nowhere
  const bool has_record = e.reference.find(e.wanted.key) != nullptr;
  const bool knows_what = numel_of(e.wanted.layout.global_shape) > kLargeTensor && !fitting.empty();
  Cause best;
  std::size_t row = 0;
  for (std::size_t i = 0; i < std::size(kPatterns); ++i) {
    const Pattern& pattern = kPatterns[i];
    if (!best.empty() && claim_of(best.id) <= pattern.first) break;
    if (knows_what && pattern.needs != Needs::kNothing && !fitting.contains(i)) continue;
    if ((pattern.kinds & bit(e.wanted.key.kind)) == 0) continue;
    if (pattern.needs >= Needs::kRecord && !has_record) continue;
    if (pattern.needs == Needs::kBytes && e.views.empty()) continue;
    Cause cause = cause_by(pattern, e);
    if (cause.empty() || (!best.empty() && claim_of(best.id) <= claim_of(cause.id))) continue;
    best = std::move(cause);
    row = i;
  }
  // that copies differ says so little that another tensor's cause says more
  if (!best.empty() && claim_of(best.id) != Claim::kDifference) fitting.insert(row);
  return best;
}

/// Adds what every cause has beside its own values: on which ranks the tensor is wrong, unless it
/// is on all that hold it, and over which axes copies differ.
void add_place(Cause& cause, const Evidence& e) {
  const auto add = [&](std::string_view name, const auto& value) {
    if (find_value(cause.values, name) == nullptr) cause.values.emplace_back(name, value);
  };
  const bool knows_ranks = cause.id != CauseId::kEitherCopyWrong;
  if (knows_ranks && e.bad_ranks().size() < e.held.size()) add("ranks", e.bad_ranks());
  if (!e.result.differing_axes.empty()) add("axes", names_of(e.result.differing_axes));
  cause.values = with_short_lists(std::move(cause.values));
}

}  // namespace

Cause diagnose(const Reference& reference, const Record& reference_record, const Trace& actual,
               const std::vector<Held>& held, const TensorResult& result,
               const JudgePolicy& options, FittingPatterns& fitting) {
  const Evidence evidence(reference, reference_record, actual, held, result, options);
  Cause cause = cause_of(evidence, fitting);
  if (!cause.empty()) add_place(cause, evidence);
  return cause;
}

}  // namespace isoshard::detail
