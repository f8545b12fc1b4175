// SPDX-License-Identifier: Apache-2.0
/// The table of patterns, in the order in which they are tried.
#include "harness/causes/diagnosis.h"

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
  Cause (*cause)(const Evidence&);
};

/// In the order in which they are tried: what explains more, and fits by chance less, comes first.
constexpr Pattern kPatterns[] = {
    {kAny, Needs::kNothing, cause_without_forward},
    {kAny, Needs::kNothing, cause_mixed_dtypes},
    {kScalar, Needs::kRecord, cause_flag},
    {kParam | kOptimizer, Needs::kRecord, cause_not_skipped},
    {kParam, Needs::kRecord, cause_not_updated},
    {kParam, Needs::kBytes, cause_of_untrained},
    {kAny, Needs::kRecord, cause_in_loading},
    {kAny, Needs::kRecord, cause_in_progress},
    {kOptimizer, Needs::kBytes, cause_in_hyperparameters},
    {kOptimizer, Needs::kRecord, cause_in_dtype},
    {kDataId, Needs::kBytes, cause_in_samples},
    {kDataId, Needs::kRecord, cause_in_data},
    {kDataId, Needs::kRecord, cause_sample_ids},
    {kScalar, Needs::kRecord, cause_in_targets},
    {kScalar, Needs::kRecord, cause_in_rank_means},
    {kScalar, Needs::kRecord, cause_backward_parts},
    {kScalar, Needs::kBytes, cause_in_loss_scale},
    {kScalar, Needs::kBytes, cause_stale},
    {kScalar, Needs::kBytes, cause_smoothed_columns},
    {kScalar, Needs::kBytes, cause_in_split_loss},
    {kScalar | kActivationGrad, Needs::kRecord, cause_rounded_exponentials},
    {kScalar, Needs::kRecord, cause_sample_weights},
    {kScalar, Needs::kRecord, cause_in_scalars},
    {kMask, Needs::kRecord, cause_in_masks},
    {kMask, Needs::kBytes, cause_other_masks},
    {kParam, Needs::kRecord, cause_in_shards},
    {kTensor, Needs::kBytes, cause_stale},
    {kOptimizer, Needs::kRecord, cause_state_as_before},
    {kTensor, Needs::kBytes, cause_rounding},
    {kGrad, Needs::kRecord, cause_rounded_sums},
    {kGrad, Needs::kRecord, cause_rounded_between},
    {kGrad, Needs::kBytes, cause_reciprocal},
    {kParam, Needs::kBytes, cause_cut_off_master},
    {kParam | kOptimizer, Needs::kBytes, cause_weight_decay},
    {kParam, Needs::kBytes, cause_in_update},
    {kParam | kOptimizer, Needs::kBytes, cause_part_not_updated},
    {kParam | kOptimizer, Needs::kBytes, cause_in_rule},
    {kParam, Needs::kBytes, cause_of_own_matrices},
    {kOptimizer, Needs::kBytes, cause_in_moments},
    {kGrad, Needs::kBytes, cause_in_buffer},
    {kGrad | kParam, Needs::kBytes, cause_in_other_gradients},
    {kAny, Needs::kRecord, cause_in_order_of_parts},
    {kTensor, Needs::kBytes, cause_other_ranks},
    {kActivation | kActivationGrad | kParam | kOptimizer, Needs::kBytes, cause_other_tensor},
    {kActivation, Needs::kBytes, cause_changed_part},
    {kActivation, Needs::kBytes, cause_in_weights_read},
    {kActivation, Needs::kRecord, cause_in_causal_mask},
    {kActivationGrad, Needs::kBytes, cause_in_weights_of_backward},
    {kGrad | kActivation, Needs::kBytes, cause_vocabulary_rows},
    {kActivationGrad, Needs::kBytes, cause_uncounted_tokens},
    {kActivationGrad, Needs::kBytes, cause_logit_rows},
    {kTensor & ~kActivation, Needs::kBytes, cause_changed_part},
    {kGrad, Needs::kBytes, cause_in_micro_batches},
    {kGrad, Needs::kBytes, cause_largest_part},
    {kNumber, Needs::kBytes, cause_rank_local},
    {kTensor, Needs::kBytes, cause_mean_of_shards},
    {kTensor, Needs::kBytes, cause_rank_factors},
    {kNumber, Needs::kNothing, cause_scale},
    {kGrad, Needs::kBytes, cause_not_cleared},
    {kGrad, Needs::kBytes, cause_in_rows},
    {kTensor, Needs::kBytes, cause_zeros},
    {kActivation, Needs::kBytes, cause_summands},
    {kAny, Needs::kBytes, cause_moved_slices},
    {kNumber, Needs::kBytes, cause_offset},
    {kAny, Needs::kBytes, cause_same_values_elsewhere},
    {kParam, Needs::kRecord, cause_in_places},
    {kActivation, Needs::kRecord, cause_in_key_order},
    {kActivationGrad, Needs::kRecord, cause_own_queries},
    {kActivation, Needs::kRecord, cause_in_tokens},
    {kActivation, Needs::kBytes, cause_in_rotation},
    {kActivation, Needs::kRecord, cause_in_scores},
    {kActivation | kActivationGrad, Needs::kRecord, cause_in_handover},
    {kTensor, Needs::kBytes, cause_part_differs},
    {kTensor, Needs::kBytes, cause_wrong_part},
    {kScalar, Needs::kBytes, cause_number_off},
    {kAny, Needs::kRecord, cause_differing_copies},
};

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
  for (std::size_t i = 0; i < std::size(kPatterns); ++i) {
    const Pattern& pattern = kPatterns[i];
    if (knows_what && pattern.needs != Needs::kNothing && !fitting.contains(i)) continue;
    if ((pattern.kinds & bit(e.wanted.key.kind)) == 0) continue;
    if (pattern.needs >= Needs::kRecord && !has_record) continue;
    if (pattern.needs == Needs::kBytes && e.views.empty()) continue;
    Cause cause = cause_by(pattern, e);
    if (cause.empty()) continue;
    // that copies differ says so little that another tensor's cause says more
    if (pattern.cause != cause_differing_copies) fitting.insert(i);
    return cause;
  }
  return {};
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
