// SPDX-License-Identifier: Apache-2.0
// The table of findings: an id, its stable name in reports, what is wrong, and the evidence. A
// finding names its place first, "gradient of w (step 0): ". Placeholders: named_values.h.
#include "harness/ids/finding.h"

#include <array>

namespace isoshard {
namespace {

constexpr auto kFindings = [] {
  using enum FindingId;
  return std::to_array<IdRow<FindingId>>({
      {kNone, "", ""},
      // ---- numbers of one tensor ----
      {kDiffers, "differs_from_reference", "differs from the reference",
       "relative error {relative_error:.3g}{allowed}, max abs {max_abs:.3g}, {unequal} of "
       "{elements} elements differ{?nonfinite}{?first}"},
      {kCopiesDifferFromReference, "copies_differ_from_reference",
       "copies differ{?over}, and from the reference",
       "relative error {relative_error:.3g}{allowed}, max abs {max_abs:.3g}, {unequal} of "
       "{elements} elements differ{?nonfinite}{?first}"},
      {kCopiesDiffer, "copies_differ", "copies differ{?over}",
       "{values} different values of what should be equal; ranks {odd_ranks} differ from the "
       "others"},
      {kSummandCopiesDiffer, "copies_of_summand_differ", "copies of a summand differ",
       "ranks {first_rank} and {second_rank} add the same part with different values"},
      {kUntouchedElementMoved, "untouched_element_changed",
       "is not the reference's where no gradient is",
       "{broken} elements, in which the reference's gradient is exactly 0{first}"},
      {kRowWithoutStep, "row_without_its_step", "has rows that did not make their step",
       "{broken} elements, in which the reference's gradient is above its response in every step "
       "so far{first}"},
      {kMaskedElementMovedTooFar, "masked_element_moved_too_far",
       "moved by more than the optimizer's rule allows",
       "{broken} elements, in which the reference's gradient is below its "
       "response{first}{?before_step}"},
      {kOutsidePublishedBound, "outside_published_bound", "outside a published bound",
       "{bound}: {measured:.3g} (published {published:.3g})"},
      {kStepNotOfRule, "step_not_of_its_rule",
       "is not what the optimizer's rule makes of the run's own state",
       "{wrong} of {elements} elements on rank {rank}, first [{index}]: {actual:.9g}, by the rule "
       "{expected:.9g}"},
      {kNotFinite, "not_finite", "is not finite far from overflow",
       "{not_finite} of {elements} numbers are not finite, {nan_actual} of them NaN; in the "
       "reference {not_finite_in_reference} are not, and the largest of the others is "
       "{largest:.3g} in units of the run, where {limit:.6g} is the largest number"},
      {kCopiesOfSkippedStepDiffer, "copies_differ_in_skipped_step", "copies differ",
       "ranks {odd_ranks} differ from the others; the step is skipped, as gradients are not "
       "finite, but all copies are of one tensor"},
      // ---- form of one tensor ----
      {kOtherShape, "other_shape", "has another shape",
       "reference [{reference}], actual [{actual}] on rank {rank}"},
      {kLayoutsDiffer, "layouts_differ", "ranks declare different layouts",
       "{first_layout} on rank {first_rank}, {layout} on rank {rank}"},
      {kCoarserDtype, "coarser_dtype_than_declared", "is kept in a coarser dtype than declared",
       "declared {declared}, actual {actual} on rank {rank}"},
      {kOtherGradientScale, "other_gradient_scale",
       "declares a gradient scale that the settings do not give",
       "declared {declared} on rank {rank}, demanded {demanded}"},
      {kUnexpectedPartialSum, "partial_sum_not_allowed",
       "is declared as a partial sum, which the trusted side does not allow",
       "{layout} on rank {rank}"},
      {kDtypesOfRanksDiffer, "dtypes_of_ranks_differ", "has another dtype",
       "{dtypes}; the reference has {reference}"},
      {kStoredInOtherDtype, "stored_in_other_dtype", "has another dtype",
       "reference {reference}, actual {actual}{?hint}"},
      {kPartsDoNotTile, "parts_do_not_tile", "parts do not tile the tensor", "{problem}"},
      // ---- records that are missing or too many ----
      {kMissing, "missing_record", "was recorded by no rank", ""},
      {kMissingOnRanks, "missing_on_ranks", "was not recorded by rank {absent}", ""},
      {kMissingBesideLikes, "missing_beside_its_like",
       "was recorded by no rank, but the like of it was", ""},
      {kExtra, "extra_record", "is not in the reference", ""},
      {kNotInCheckpoint, "not_in_checkpoint", "is not in {checkpoint}", ""},
      {kReadsMissing, "reads_missing", "was recorded by no rank",
       "nothing shows what forward read"},
      {kReadsMissingOnRanks, "reads_missing_on_ranks",
       "was not recorded by every rank that steps it", "nothing shows what forward read"},
      // ---- what a run repeats ----
      {kReadsOtherParameter, "reads_other_parameter", "is not the parameter after the step before",
       "forward reads other values than those that were stepped and recorded"},
      {kRecomputedOtherwise, "recomputed_otherwise", "is not what forward had the first time",
       "a layer that is computed again for backward must give the same bits"},
      {kRunsDiffer, "runs_differ", "run {run} differs from run 1",
       "of {runs} runs of the same case, weights and batches, run {run} is the first that is not "
       "run 1 bit by bit: {difference}{?not_emulated}"},
      {kOtherBits, "other_bits_than_emulated", "differs from the emulated reference in bits",
       "{difference}; every value compares equal, so it is a zero of the other sign, another "
       "NaN, or a summand of an equal sum"},
      {kOtherRanks, "other_ranks_than_emulated", "{difference}",
       "{difference}; every value compares equal, so it is a zero of the other sign, another "
       "NaN, or a summand of an equal sum"},
      // ---- many tensors together ----
      {kPoolScale, "pooled_scale", "scale {scale:.6g} (allowed {least:.6g} to {most:.6g})",
       "{pool_size}; scale {scale:.6g} (allowed {least_scale:.6g} to {most_scale:.6g}), shift "
       "{shift:.3g} (allowed {least_shift:.6g} to {most_shift:.6g}) against {runs} redrawn runs "
       "of the reference; {outside} of {judged} pools of this step and kind are outside, no "
       "tensor by its own error"},
      {kPoolShift, "pooled_shift",
       "shift {shift:.3g} of the root mean square (allowed {least:.6g} to {most:.6g})",
       "{pool_size}; scale {scale:.6g} (allowed {least_scale:.6g} to {most_scale:.6g}), shift "
       "{shift:.3g} (allowed {least_shift:.6g} to {most_shift:.6g}) against {runs} redrawn runs "
       "of the reference; {outside} of {judged} pools of this step and kind are outside, no "
       "tensor by its own error"},
      // ---- collectives ----
      {kCallsMissing, "calls_missing", "were not recorded",
       "the table has {calls} calls, first {first}"},
      {kCallDiffersFromTable, "call_differs_from_table",
       "call {call} of {calls} must be {must}, got {got}",
       "the table has {table_calls} calls along {axis} in this step"},
      {kUnknownCallDiffersFromTable, "unknown_call_differs_from_table",
       "call {call} is not the one in the table",
       "the table has {table_calls} calls along {axis} in this step"},
      {kNoJournal, "journal_missing", "no journal", "other ranks or steps have one"},
      {kCallsOfRanksDiffer, "calls_of_ranks_differ", "{difference}",
       "rank {usual_rank} makes {usual_calls} calls, rank {rank} {calls}; {different} of them "
       "differ{different:verb}"},
      {kReducedOtherTimes, "reduced_other_times",
       "{tensor} is reduced {times} time{times:s}, not {usual_times}{and_never}",
       "the calls themselves are alike: another tensor was given"},
      {kCallsOfStepsDiffer, "calls_of_steps_differ",
       "{op}: {calls} call{calls:s} of {bytes} bytes in all, in step {usual_step} {usual_calls} "
       "call{usual_calls:s} of {usual_bytes} bytes in all{?first}",
       "steps on inputs of one shape must reduce the same"},
      // ---- samples, found by the Python package ----
      {kGiven, "given", "{problem}", ""},
      {kSamplesNotShared, "samples_not_shared",
       "the single process has {samples} samples, and so has each of {having} ranks, though "
       "{data_ranks} data-parallel ranks must share them out",
       ""},
      {kEqualInputs, "equal_inputs",
       "the data-parallel ranks {ranks} read equal inputs, though they must share the samples out",
       ""},
      {kOtherNumberOfCalls, "other_number_of_calls",
       "the single process calls the model {reference_calls} times in a step, rank {rank} "
       "{calls} times",
       ""},
      {kSamplesTwice, "samples_twice",
       "{samples} of rank {rank}'s {own} samples are samples of rank {other}, too", ""},
      {kSamplesMissing, "samples_missing",
       "{missing} of the single process's {samples} samples are on no rank", ""},
      {kBufferDiffers, "buffer_differs",
       "is a buffer with other values than in the single process: norm {norm:.6g}, not "
       "{reference_norm:.6g}",
       ""},
  });
}();
static_assert(is_complete(kFindings),
              "kFindings must have one row for each FindingId, in its order");

}  // namespace

std::span<const IdRow<FindingId>> rows_of(FindingId) noexcept {
  return kFindings;
}

}  // namespace isoshard
