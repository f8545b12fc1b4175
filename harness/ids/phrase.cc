// SPDX-License-Identifier: Apache-2.0
// The table of phrases: an id, its name, and its text. Placeholders: named_values.h.
#include "harness/ids/phrase.h"

#include <array>

namespace isoshard {
namespace {

constexpr auto kPhrases = [] {
  using enum PhraseId;
  return std::to_array<IdRow<PhraseId>>({
      {kNone, "", ""},
      // ---- of findings ----
      {kOverAxes, "over_axes", " over {axes:and}"},
      {kMustBeEqual, "must_be_equal", " (must be equal)"},
      {kAllowedNorm, "allowed_norm",
       ", error norm {error_norm:.3g} (allowed {allowed_error_norm:.3g}: the reference is below "
       "its own response)"},
      {kAllowedError, "allowed_error",
       " (allowed {allowed_relative_error:.3g}), scale {scale:.6g} (allowed error "
       "{allowed_scale_error:.3g})"},
      {kNotFiniteOnOneSide, "not_finite_on_one_side",
       ", {not_finite} not finite on one side only ({nan_reference} NaN and {inf_reference} Inf "
       "in reference, {nan_actual} and {inf_actual} in actual)"},
      {kFirstStoredElement, "first_stored_element",
       "; first at [{index}]: reference {reference:.9g}"},
      {kFirstElement, "first_element",
       "; first on rank {rank} at [{index}]: reference {reference:.9g}"},
      {kActualElement, "actual_element", ", actual {actual:.9g}"},
      {kBeforeStep, "before_step", ", before {before:.9g}, which may move by {allowed_step:.3g}"},
      {kOneTensor, "one_tensor", "one tensor"},
      {kTensorsTogether, "tensors_together", "{tensors} tensors together"},
      {kRoundingIsOffered, "rounding_is_offered",
       "; --allow-different-dtypes rounds the finer one"},
      {kNotEmulated, "not_emulated", "; run 1 is not the emulated reference: {difference}"},
      {kNeverReduced, "never_reduced", "; {tensor}: never"},
      {kMoreNeverReduced, "more_never_reduced", "; {more} more: never"},
      {kFirstCallOf, "first_call_of", "; {difference}"},
      {kCallMustBe, "call_must_be", "call {call} of {calls} must be {must}, got {got}"},
      {kCallIsMissing, "call_is_missing", "call {call} of {calls} is missing, {must}"},
      {kCallIsTooMany, "call_is_too_many", "call {call} of {calls} is one too many, {got}"},
      // ---- of several causes ----
      {kCoordinates, "coordinates", "{axis} rank{coordinates:s} {coordinates}"},
      {kOn, "on", " on {where}"},
      {kOnRanks, "on_ranks", " on rank{ranks:s} {ranks}"},
      // ---- of causes: one factor, one offset, one rank's share ----
      {kRanksThatShareAPart, "ranks_that_share_a_part", "the {axis} ranks that share a part"},
      {kOnTheRanks, "on_the_ranks", " on rank {ranks}"},
      {kUpdate, "update", "update "},
      {kRootOfScores, "root_of_scores",
       " = {inverse}sqrt({number}): are attention scores scaled by it?"},
      {kShareThatDropoutKeeps, "share_that_dropout_keeps",
       ", about the share that dropout keeps ({kept:.3g} of {mask}): what is kept is not divided "
       "by it"},
      {kShareThatDropoutKeepsTwice, "share_that_dropout_keeps_twice",
       ", about the share that dropout keeps ({kept:.3g} of {mask}) in the denominator: what is "
       "kept is divided by it twice"},
      // ---- of causes: accumulation ----
      {kFromZeroTo, "from_zero_to", "0..{last}"},
      // ---- of causes: data ----
      {kInStepZero, "in_step_zero", "in step 0"},
      {kInSteps, "in_steps", "in steps 0..{last}"},
      {kIdsSeenMoreOften, "ids_seen_more_often", "seen more often than they should be: {ids}"},
      {kIdsMissed, "ids_missed", "never seen: {ids}"},
      {kIdsForeign, "ids_foreign", "not the reference's: {ids}"},
      {kAndIds, "and_ids", "; ids {until} {counts}"},
      {kStays, "stays", "stays"},
      {kGrowsBy, "grows_by", "grows by {factor:g}"},
      {kShrinksBy, "shrinks_by", "shrinks by {factor:g}"},
      {kSinceOverflow, "since_overflow", " since that of step {overflow_step}"},
      // ---- of causes: factor ----
      {kAlong, "along", " {axis}"},
      {kTimesSummand, "times_summand", "{factor:.4g} x {summand}"},
      // ---- of causes: moved ----
      {kCopiesDifferOver, "copies_differ_over", "copies differ over {axes:and}; "},
      {kPosition, "position", "position {first}"},
      {kPositions, "positions", "positions {first}..{last}"},
      {kTwice, "twice", "twice"},
      {kTimes, "times", "{times} times"},
      {kMoves, "moves", " ({slices}{blocks}: {places})"},
      {kInBlocks, "in_blocks", ", in blocks of {block}"},
      {kPlaceHas, "place_has", "{place} has {other}"},
      {kTokenHas, "token_has",
       "sample {sample} token {token} has sample {other_sample} token {other_token}"},
      // ---- of causes: norm ----
      {kPartsThatSeveralHold, "parts_that_several_hold", "parts that several {axis} ranks hold"},
      {kPartsOfVectors, "parts_of_vectors", "parts of vectors on {axis} ranks above 0"},
      {kPartsOfRank, "parts_of_rank", "{axis} rank {coordinate}'s parts"},
      {kAll, "all", "all {kind}"},
      {kAllNorms, "all_norms", "all norms"},
      {kAllBiases, "all_biases", "all biases"},
      {kAllParametersOf, "all_parameters_of", "all parameters of {layer}"},
      {kAllOutsideOfLayers, "all_outside_of_layers", "all parameters outside of layers"},
      {kParameterCount, "parameter_count", " ({count} parameters)"},
      // ---- of causes: part ----
      {kElementsOnRank, "elements_on_rank", "elements {elements} on {axis} rank {coordinate}"},
      {kElementRun, "element_run", "element{count:s} {range}"},
      {kSlicesOfDim, "slices_of_dim", "slice{count:s} {range} of dim {dim}"},
      {kAllElements, "all_elements", "all elements"},
      {kRestIsRight, "rest_is_right", "; the rest is right"},
      {kOfWhatTheStepAdds, "of_what_the_step_adds", " of what the step adds"},
      {kIsFormula, "is_formula", " = {formula}"},
      {kOrFactor, "or_factor", " or by a factor of {scale:.6g}"},
      {kOrFactors, "or_factors", " or by factors of {factors:.6g}"},
      {kOrTimes, "or_times", ", or {scale:.6g} times the right one, as many as an axis has ranks"},
      // ---- of causes: read ----
      {kRanks, "ranks", "rank{ranks:s} {ranks}"},
      // ---- of causes: resume ----
      {kParametersRight, "parameters_right", "; parameters right"},
      {kMaskOfRankEquals, "mask_of_rank_equals", "mask of rank {rank} equals"},
      {kMasksOfRanksEqual, "masks_of_ranks_equal", "masks of ranks {ranks} equal"},
      {kMasksOfRowEqual, "masks_of_row_equal", "masks of ranks {first}..{last} equal"},
      {kRightBeforeSaving, "right_before_saving", "; right before saving"},
      {kAfterResume, "after_resume", "after resume: "},
      // ---- of causes: rule ----
      {kMomentOfBoth, "moment_of_both", "{before:.4g} x before + {gradient:.3g} x gradient{power}"},
      {kMomentOfGradient, "moment_of_gradient", "{gradient:.3g} x gradient{power}"},
      // ---- of causes: scalar ----
      {kOnePerSample, "one_per_sample", ", one per sample"},
      {kSomePerSample, "some_per_sample", ", {each} per sample"},
      {kAtValidToken, "at_valid_token", " at the {place} valid token"},
      {kPlainTimes, "plain_times", "{times:g}"},
      {kTimesOfFormula, "times_of_formula", "{times:.4g} = {formula}"},
      {kOfTokens, "of_tokens", " ({token_counts:g} tokens)"},
      {kRoundedDown, "rounded_down", ", rounded down to a multiple of {axis}"},
      // ---- of causes: stage ----
      {kInMicroBatchesOnly, "in_micro_batches_only",
       ", in micro-batch{micro_batches:es} {micro_batches} only"},
      // ---- of causes: stale ----
      {kCameBefore, "came_before", ", which came before: stale"},
      {kOfStep, "of_step", " of step {step}"},
      {kTimesAdded, "times_added", "{times:.4g} x "},
      // ---- of causes: step ----
      {kPartOfDpRank, "part_of_dp_rank", ": the part of dp rank {dp_rank}"},
      {kElement, "element", "element {first}"},
      {kElements, "elements", "elements {first}..{last}"},
      // ---- of causes: tensor ----
      {kFused, "fused", "fused "},
      {kShards, "shards", "shards"},
      {kWholeValues, "whole_values", "values"},
      {kOthersAreRight, "others_are_right", "; {where} right"},
      {kModelCast, "model_cast", " (was the model cast on some ranks only?)"},
      {kAutocast, "autocast", " (autocast on some ranks only?)"},
      {kTimesParameter, "times_parameter", "{factor:.3g} x "},
      {kOneLessThanAxis, "one_less_than_axis", " = ({axis} - 1) x {word}"},
      // ---- of causes: vocabulary ----
      {kAndPresent, "and_present", ", and of {present} that have no gradient"},
      {kTheLast, "the_last", "the last"},
      {kAnyOne, "any_one", "one"},
      // ---- of causes: around the first cause ----
      {kCauseOf, "cause_of", "{tensor}: {cause}"},
      {kFurther, "further", "; {words}"},
      {kSameKinds, "same_kinds", " ({same_kinds})"},
      {kOfAnotherTensor, "of_another_tensor", "of another tensor of this stage, {diagnosis}"},
      {kOfAllGradients, "of_all_gradients", "gradients of all parameters: {cause}"},
      {kOfAllClippedGradients, "of_all_clipped_gradients",
       "clipped gradients of all parameters: {cause}"},
      {kOfAllParameters, "of_all_parameters", "values after the step of all parameters: {cause}"},
      {kTheSameFor, "the_same_for", "; the same for {same} of {same_of}{?kinds}"},
      {kOfPoints, "of_points", " ({point}, {same} of {same_of})"},
      {kForwardExact, "forward_exact", "; forward exact"},
      {kForwardRight, "forward_right", "; forward right"},
      {kGradientsWrong, "gradients_wrong", ", gradients wrong"},
      {kAlthoughReduced, "although_reduced",
       "; the journal shows its reduction{?called_at}, so that is not missing"},
      {kCalledAt, "called_at", " ({line})"},
      // ---- of causes: samples and steps of a training loop ----
      {kTheyAreOfStep, "they_are_of_step", ", but in that of step {step}"},
  });
}();
static_assert(is_complete(kPhrases), "kPhrases must have one row for each PhraseId, in its order");

}  // namespace

std::span<const IdRow<PhraseId>> rows_of(PhraseId) noexcept {
  return kPhrases;
}

std::string phrase(PhraseId id, const NamedValues& values) {
  return filled(row_of(id).text, values, name_of(id));
}

}  // namespace isoshard
