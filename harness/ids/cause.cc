// SPDX-License-Identifier: Apache-2.0
// The table of causes: an id, its stable name in reports, and its text. Parts that several texts
// share, or that some end with, are phrases (phrase.cc). Placeholders: named_values.h.
#include "harness/ids/cause.h"

#include <array>

namespace isoshard {
namespace {

constexpr auto kCauses = [] {
  using enum CauseId;
  return std::to_array<IdRow<CauseId>>({
      {kNone, "", ""},
      // ---- one factor, one offset, one rank's share ----
      {kScale, "scale", "{?before}scale {scale:.4g}{?hint}{?on_ranks}"},
      {kScaleNearOne, "scale_near_one", "{?before}scale 1 {sign} {away:.2g}{?hint}{?on_ranks}"},
      {kScaleOfFormula, "scale_of_formula", "{?before}scale {scale:.4g} = {formula}{?on_ranks}"},
      {kClippingNotApplied, "clipping_not_applied",
       "{?before}scale {scale:.4g} = norm / max_norm: clipping not applied{?on_ranks}"},
      {kClippedTwice, "clipped_twice",
       "{?before}scale {scale:.4g} = max_norm / norm: clipped twice{?on_ranks}"},
      {kScaledUpToLimit, "scaled_up_to_limit",
       "{?before}scale {scale:.4g} = max_norm / norm: gradients whose norm is below the limit are "
       "scaled up to it{?on_ranks}"},
      {kClippedByOtherNorm, "clipped_by_norm_of_other_step",
       "{?before}scale {scale:.4g}: clipped by the norm of step {step}{?on_ranks}"},
      {kRankLocalPartial, "rank_local_partial",
       "rank-local partial over {holders} ({copies} copies differ, their sum equals the "
       "reference)"},
      {kRankLocal, "rank_local",
       "rank-local over {holders} ({copies} copies differ; combined they give the reference)"},
      {kMeanOfShards, "mean_of_shards",
       "every shard is the mean of the {shards} shards over {axis} (best fit {best_fit:.2g})"},
      {kConstantOffset, "constant_offset", "constant offset {offset:.4g} on rank {rank}"},
      {kSameRowAdded, "same_row_added", "off by the same row everywhere on rank {rank}"},
      {kPartScaled, "part_scaled",
       "{where}{?of_step}: scale {scale:.6g}{?is_formula}{on_ranks}{?others}"},
      {kPartOffset, "part_offset", "{where}{?of_step}: offset {offset:.4g}{on_ranks}{?others}"},
      {kPartMoved, "part_moved",
       "{where}{?of_step}: moved by {shift} place{shift:s}{on_ranks}{?others}"},
      {kPartRounded, "part_rounded", "{where}{?of_step}: rounded to {dtype}{on_ranks}{?others}"},
      {kOneElementWrong, "one_element_wrong",
       "element {index}{?of_step} alone is wrong: off by {offset:.4g}{?or_factor}{on_ranks}"},
      {kPartWrong, "part_wrong", "{where} alone: all wrong elements are there{on_ranks}"},
      {kZeros, "zeros",
       "{zeros} element{zeros:s} that should not be {zeros:is} 0, the others right (in "
       "row{rows:s} {first_rows}){on_ranks}"},
      {kNumberOff, "number_off", "{?before}off by {offset:.4g}{?or_factor}{on_ranks}"},
      {kNumbersOff, "numbers_off", "{?before}ranks {ranks} are off by {offsets:.4g}{?or_factors}"},
      {kCopiesDifferOverAxes, "copies_differ_over_axes", "copies differ over {axes:and}"},
      {kEitherCopyWrong, "either_copy_wrong",
       "copies differ over {axes:and}, and each is as near to the reference as the others"},
      {kValuesNotFinite, "values_not_finite", "{num_values} value{num_values:s} not finite"},
      // ---- accumulation ----
      {kLargestPart, "largest_part",
       "each element is the largest of what the {degree} {axis} ranks give, not their "
       "{reduction}{on_ranks}"},
      {kSmallestPart, "smallest_part",
       "each element is the smallest of what the {degree} {axis} ranks give, not their "
       "{reduction}{on_ranks}"},
      {kSumRoundedBetween, "sum_rounded_between_micro_batches",
       "the sum of micro-batches is rounded to {dtype} before the next one is added: it is off "
       "by what that takes from the sum{sums:s} after micro-batch{sums:es} {after}"},
      // ---- attention ----
      {kCausalMaskShowsNextToken, "causal_mask_shows_next_token",
       "the causal mask is off: each query sees the token after its own, too{on_ranks}"},
      {kCausalMaskHidesOwnToken, "causal_mask_hides_own_token",
       "the causal mask is off: no query sees its own token{on_ranks}"},
      {kCausalMaskShowsAllTokens, "causal_mask_shows_all_tokens",
       "the causal mask is off: each query sees all tokens, those after its own, too{on_ranks}"},
      {kCpChunksInWrongOrder, "cp_chunks_in_wrong_order",
       "{tensors} of cp ranks come together in the wrong order: the {chunks} chunks of the "
       "sequence stand as {order}{on_ranks}"},
      {kOwnQueriesOnly, "own_queries_only",
       "only what queries of its own cp rank give is in it, the sum over cp is missing{on_ranks}"},
      {kKvHeadsInTurn, "kv_heads_in_turn",
       "query heads take the {kv_heads} kv heads in turn (0, 1, ...), where {heads_of_kv_head} "
       "heads that follow each other share one"},
      {kScoresScaledByRoot, "attention_scores_scaled_by_root",
       "attention scores scale {scale:.4g} = {inverse}sqrt({number}); queries, keys and values "
       "are right"},
      {kScoresScaledByRatio, "attention_scores_scaled_by_ratio",
       "attention scores scale {scale:.4g}; queries, keys and values are right: is the scale "
       "made of a layer's number in its stage?"},
      // ---- data ----
      {kIdsOfEarlierStep, "sample_ids_of_earlier_step", "the ids of step {step} again"},
      {kIdsTooLarge, "sample_ids_too_large", "each id is {by} more than the reference's{?and_ids}"},
      {kIdsTooSmall, "sample_ids_too_small", "each id is {by} less than the reference's{?and_ids}"},
      {kIdsMiscounted, "sample_ids_miscounted", "ids {until} {counts}"},
      {kFlagOutOfRange, "flag_out_of_range", "a flag must be 0 or 1, got {value:g}{on_ranks}"},
      {kFlagWrongOnEveryRank, "flag_wrong_on_every_rank",
       "a flag: {value:g} on every rank, {expected:g} in the reference"},
      {kFlagNotReduced, "flag_not_reduced",
       "a flag: differs over {axes:and}, not reduced (wrong{on_ranks})"},
      {kLossScaleAfterOverflow, "loss_scale_after_overflow",
       "the scale {change} after the overflow of step {overflow_step}, where it "
       "{expected_change}{on_ranks}"},
      {kLossScaleChangedTwice, "loss_scale_changed_twice",
       "the scale {change} after the overflow of step {overflow_step}, where it "
       "{expected_change}: twice in one step{on_ranks}"},
      {kLossScaleWithoutOverflow, "loss_scale_without_overflow",
       "the scale {change} after {good_steps} step{good_steps:s} without an overflow{?since}, "
       "where it {expected_change}{on_ranks}"},
      // ---- factor ----
      {kFactorPerRank, "factor_per_rank", "one factor for each{?along} rank: {factors:.4g}"},
      {kFactorPerRankOfFormula, "factor_per_rank_of_formula",
       "one factor for each{along} rank: {factors:.4g} ({behind})"},
      {kScaledByRankPlusOne, "scaled_by_rank_plus_one",
       "one factor for each {axis} rank: {factors:.4g} = rank + 1"},
      {kDividesByOwnCount, "divides_by_own_token_count",
       "one factor for each {axis} rank: {factors:.4g} = all tokens / ({degree} x its own), "
       "which are {token_counts:g}: each rank divides by its own count"},
      {kWeightedByOwnCount, "weighted_by_own_token_count",
       "one factor for each {axis} rank: {factors:.4g} = {degree} x its own tokens / all "
       "tokens, which are {token_counts:g}"},
      {kSummandFactors, "summands_with_wrong_factors",
       "summands with wrong factors: {products}, each should have 1{on_ranks}"},
      // ---- micro-batches ----
      {kMicroBatchMissing, "micro_batch_missing",
       "only micro-batch{present:es} {present} of 0..{last} {present:is} present"},
      {kMicroBatchRankLocal, "micro_batch_rank_local",
       "micro-batch{local:es} {local} of 0..{last} {local:is} rank-local over {axis}, {right} "
       "right"},
      {kPiecesRankLocal, "pieces_rank_local",
       "rank-local over {axis}: each piece holds what its rank's own samples give"},
      {kMicroBatchWeights, "micro_batch_weights",
       "micro-batches enter with weights {weights:.3g} instead of 1/{micro_batches} each"},
      {kTiedUseMissing, "tied_weight_use_missing",
       "only what {present} gives is in it, what {missing} gives is missing: the sum over the "
       "uses of a tied weight{on_ranks}"},
      // ---- moved ----
      {kSlicesRepeated, "slices_repeated",
       "{?copies_differ}rank {rank} holds {positions} {often}{?others}"},
      {kSlicesShifted, "slices_shifted",
       "{?copies_differ}shift {shift} along dim {dim} on rank {rank}{?others}"},
      {kSlicesPermuted, "slices_permuted",
       "{?copies_differ}permuted along dim {dim} on rank {rank}{?moves}{?others}"},
      {kTokensElsewhere, "tokens_at_places_of_others",
       "{?copies_differ}tokens stand at the places of others on rank {rank} ({tokens}){?others}"},
      {kValuesOfOtherRanks, "values_of_other_ranks",
       "rank{ranks:s} {ranks} hold{ranks:verb} what rank{owners:s} {owners} should hold"},
      {kTokensPermutedBetweenSamples, "tokens_permuted_between_samples",
       "tokens permuted between samples on rank {rank}"},
      {kSameValuesElsewhere, "same_values_elsewhere",
       "permuted (the same values at other places) on rank {rank}"},
      // ---- norm ----
      {kSquaresLeftOut, "norm_squares_left_out",
       "too small; the squares of {group}{?count} are left out"},
      {kSquaresCountedTwice, "norm_squares_counted_twice",
       "too large; the squares of {group}{?count} are counted twice"},
      {kSquaresOfCopiesCounted, "norm_squares_counted_for_each_copy",
       "too large; the squares of {group}{?count} are counted for each rank that holds a copy"},
      // ---- part ----
      {kPartNotReached, "part_has_not_reached_ranks",
       "copies differ over {axis} in a part of the elements, which another rank has right: "
       "{elements}; it did not reach these ranks, or was changed there"},
      // ---- read ----
      {kStaleParametersRead, "stale_parameters_read",
       "parameters read in step {step}: {parameter} stale by {steps} step{steps:s} on {where}"},
      {kParametersOfAnother, "parameters_of_another_module_read",
       "parameters read: {read} in the place of {parameter}{on_ranks}"},
      {kPredecessorPadding, "predecessor_padding",
       "gathered parameters: first {elements} elements of the weight after {predecessor} "
       "({parameter}) are wrong (predecessor padding)"},
      {kOneMaskForSamples, "one_mask_for_different_samples",
       "{where} use one mask for different samples"},
      {kOneMaskForTokens, "one_mask_for_different_tokens",
       "{where} use one mask for different tokens"},
      {kOneMaskForPlaces, "one_mask_for_different_places",
       "{where} use one mask for different places"},
      {kGradientOfOtherActivation, "gradient_of_other_activation",
       "equals the gradient at {other}: taken for it, or what else should be added on the way is "
       "missing{on_ranks}"},
      {kValuesOfOtherTensor, "values_of_other_tensor", "has the values of {other}{on_ranks}"},
      {kWrongValuesOfOtherTensor, "wrong_values_of_other_tensor",
       "wrong values equal values of {other} (from element {element} on)"},
      // ---- resume ----
      {kOptimizerStatesSwapped, "optimizer_states_swapped",
       "optimizer state after load: {state} of {module} and {other} are "
       "swapped{?parameters_right}"},
      {kOptimizerStateOfOther, "optimizer_state_of_other_parameter",
       "optimizer state after load: {state} of {module} are those that were saved of "
       "{other}{?parameters_right}"},
      {kOptimizerStateOfOtherKind, "optimizer_state_of_other_kind",
       "optimizer state after load: {state} of {parameter} is what was saved as {other}"},
      {kMasksOfOtherRank, "masks_of_other_rank_after_resume",
       "after resume: {masks} the mask of rank {owner_rank}{?right_before}"},
      {kSamplerAhead, "sampler_ahead", "sampler {steps} step{steps:s} ahead"},
      {kSamplerBehind, "sampler_behind", "sampler {steps} step{steps:s} behind"},
      {kUpdatesMiscounted, "updates_miscounted",
       "{?when}{counted:g} updates counted, {made:g} were made{?right_before}"},
      {kMasksOfOtherStep, "masks_of_other_step_drawn",
       "{?when}masks of step {step:g}, expected {expected:g}{?right_before}"},
      {kOtherMaskSeed, "other_mask_seed", "{?when}another seed of masks{?right_before}"},
      // ---- rounding ----
      {kRounded, "rounded",
       "rounded to {dtype}: all {values} values have at most {bits} significant bits, and differ "
       "from the right ones by at most half a step{on_ranks}"},
      {kSummandsRounded, "summands_rounded",
       "summands rounded to {dtype} before they are added over {added_over}: {percent:.0f} % of "
       "{values} values are sums of numbers of {bits} significant bits{on_ranks}"},
      {kMultipliedWithReciprocal, "multiplied_with_rounded_reciprocal",
       "multiplied with the rounded reciprocal in place of divided by {degree} = {axis}: each "
       "of {values} values, {differing} of which differ, is what that makes of one sum{on_ranks}"},
      {kNotMultipliedWithReciprocal, "divided_in_place_of_reciprocal",
       "divided in place of multiplied with the rounded reciprocal of {degree} = {axis}: each "
       "of {values} values, {differing} of which differ, is what that makes of one sum{on_ranks}"},
      {kMicroBatchSumsRounded, "micro_batch_sums_rounded",
       "rounded to {dtype}: all {values} values that ranks hold after micro-batch {micro_batch} "
       "have at most {bits} significant bits"},
      {kMastersCutOff, "masters_cut_off",
       "masters are cut off to {dtype}, not rounded: {cut} of {values} values are a step nearer "
       "to 0{on_ranks}"},
      // ---- rule ----
      {kMomentWithOtherFactors, "moment_with_other_factors",
       "{state} is {seen}, where {right} is right{on_ranks}"},
      {kMomentWithOtherBeta, "moment_with_other_beta",
       "{state} is {seen}, where {right} is right: beta{used_beta} in the place of "
       "beta{own_beta}{on_ranks}"},
      {kEpsInsideRoot, "eps_inside_root",
       "another step of right moments: eps ({eps:g}) is inside of the root: sqrt(v + eps), not "
       "sqrt(v) + eps{on_ranks}"},
      {kEpsInsideUncorrectedRoot, "eps_inside_uncorrected_root",
       "another step of right moments: eps ({eps:g}) is inside of the root of the uncorrected "
       "exp_avg_sq{on_ranks}"},
      {kRootMissing, "root_of_second_moment_missing",
       "another step of right moments: the root of exp_avg_sq is missing{on_ranks}"},
      {kFirstMomentUncorrected, "first_moment_not_bias_corrected",
       "another step of right moments: exp_avg has no bias correction{on_ranks}"},
      {kSecondMomentUncorrected, "second_moment_not_bias_corrected",
       "another step of right moments: exp_avg_sq has no bias correction{on_ranks}"},
      {kMomentsUncorrected, "moments_not_bias_corrected",
       "another step of right moments: neither moment has a bias correction{on_ranks}"},
      {kCorrectionOfOtherUpdate, "bias_correction_of_other_update",
       "another step of right moments: the bias correction is that of update {used:g}, where "
       "this is update {update:g}{on_ranks}"},
      {kOtherEps, "other_eps",
       "another step of right moments: eps is {used:.3g}, not {eps:g}{on_ranks}"},
      {kDecayBehindStep, "decay_behind_step",
       "another step of right moments: the weight decay is applied behind the step, to what it "
       "made, not before it{on_ranks}"},
      {kStepNotSkipped, "step_not_skipped",
       "gradients overflow (found_inf is 1), so the step must be skipped, and it is "
       "made{on_ranks}"},
      {kStateOfSkippedStep, "state_of_skipped_step",
       "the reference has no such state in a step whose gradients overflow (found_inf is 1), "
       "which must be skipped"},
      {kUntrainedChanged, "untrained_parameter_changed",
       "it has no gradient and must stay as it was{on_ranks}"},
      {kUntrainedDecayed, "untrained_parameter_decayed",
       "weight decay ({rate:.3g} x {decay:.3g}) of a parameter that is not trained: it has no "
       "gradient and must stay as it was{on_ranks}"},
      {kUntrainedScaled, "untrained_parameter_scaled",
       "multiplied with {factor:.6g}: it has no gradient and must stay as it was{on_ranks}"},
      // ---- scalar ----
      {kValidTokensElsewhere, "valid_tokens_at_other_positions",
       "valid tokens: as many as the reference, at other positions"},
      {kFewerValidTokens, "fewer_valid_tokens",
       "valid tokens: {num_tokens} fewer than the reference{?per_sample}{?at_place}"},
      {kMoreValidTokens, "more_valid_tokens", "valid tokens: {num_tokens} more than the reference"},
      {kIdsInOtherOrder, "ids_in_other_order", "the same {items} in another order"},
      {kIdsRepeated, "ids_repeated",
       "each of the {items} seen appears {how_often} times; {share} of them are never seen"},
      {kMeanOfRankMeans, "mean_of_means",
       "equals the mean of {means} rank means{?of_tokens}, not the token mean"},
      {kReplicatedCountedOften, "norm_counts_replicated_on_each_rank",
       "{direction}; fits sqrt(split + {degree} x replicated), {degree} = {axis}"},
      {kNormOfOneRank, "norm_of_one_rank",
       "{direction}; equals the norm over {axis} rank {coordinate} alone"},
      {kReplicatedLeftOut, "norm_lacks_replicated", "{direction}; replicated weights are left out"},
      {kLargestElement, "largest_element_as_norm",
       "the largest element of all gradients, not their norm"},
      {kNormSquared, "norm_without_root", "the square of the norm: the root is missing"},
      {kNormsAdded, "norms_of_ranks_added",
       "too large; the norms of the {world_size} ranks' own parts are added, not their squares"},
      {kNormsOfAxisAdded, "norms_of_axis_added",
       "too large; the norms of the {degree} {axis} ranks' own parts are added, not their "
       "squares"},
      {kSquaresNotSummed, "norm_squares_not_summed",
       "differs over {axis}; squares summed over {axis} give the reference"},
      {kPaddingInSoftmax, "padding_in_softmax",
       "offset {offset:.4g}: {columns} columns of padding with logits of 0 take part in the "
       "softmax (the padded width of {head} is {padded}, the true one {width})"},
      {kOffsetOfDegree, "offset_log_of_degree", "constant offset {offset:.4g} = log({axis})"},
      {kOffsetOfWidths, "offset_log_of_padded_width",
       "constant offset {offset:.4g} = log({padded}/{width}), the padded over the true width of "
       "{head}"},
      {kDividedByOtherCount, "divided_by_other_token_count",
       "divided by {used:g} tokens, where {right:g} count{?rounded}"},
      {kRateOfOtherStep, "learning_rate_of_other_step",
       "the learning rate of step {step}{?or_times}{on_ranks}"},
      {kHyperparametersDiffer, "hyperparameters_differ",
       "{name} of {parameter} is {actual:.6g}, and {expected:.6g} in the reference{on_ranks}"},
      // ---- softmax ----
      {kOwnLargestLogit, "largest_logit_of_rank_taken_off",
       "each tp rank takes the largest logit of its own columns off before sums of exponentials "
       "are added, not the largest of all"},
      {kTargetsInFirstColumnLost, "targets_in_first_column_lost",
       "targets in the first column of a tp rank's part are found by no rank"},
      {kTargetsInLastColumnLost, "targets_in_last_column_lost",
       "targets in the last column of a tp rank's part are found by no rank"},
      {kExponentialsOfRankRounded, "sum_of_exponentials_of_rank_rounded",
       "each tp rank's sum of exponentials is rounded to {dtype} before ranks add them: the "
       "softmax of {num_tokens} tokens is off by what that makes of it, up to {largest:.2g}"},
      {kExponentialsRounded, "sum_of_exponentials_rounded",
       "the sum of exponentials over all columns is rounded to {dtype}: the softmax of "
       "{num_tokens} tokens is off by what that makes of it, up to {largest:.2g}"},
      {kLogarithmRounded, "logarithm_of_exponentials_rounded",
       "the logarithm of the sum of exponentials is rounded to {dtype}: the softmax of "
       "{num_tokens} tokens is off by what that makes of it, up to {largest:.2g}"},
      {kSmoothingOverPadding, "smoothing_over_padding",
       "offset {offset:.4g}: label smoothing of {smoothing:.3g} takes its mean over {padded} "
       "columns, the padded width of {head}, the true one is {width}"},
      // ---- stage ----
      {kBackwardReadsEarlierWeight, "backward_reads_earlier_weight",
       "backward reads that of step {step} in the place of {parameter}, which forward reads "
       "right{on_ranks}"},
      {kBackwardReadsOtherWeight, "backward_reads_other_weight",
       "backward reads {other} in the place of {parameter}, which forward reads right{on_ranks}"},
      {kBackwardReadsZerosInPart, "backward_reads_zeros_in_part",
       "backward reads zeros in the part of dp rank {dp_rank} in the place of {parameter}, which "
       "forward reads right{on_ranks}"},
      {kBackwardReadsMovedParts, "backward_reads_parts_of_other_ranks",
       "backward reads the parts of dp ranks {dp_ranks} further on in the place of {parameter}, "
       "which forward reads right{on_ranks}"},
      {kBackwardReadsZeros, "backward_reads_zeros",
       "backward reads zeros in the place of {parameter}, which forward reads right{on_ranks}"},
      {kNothingDropped, "nothing_dropped", "nothing is dropped there, as in evaluation mode"},
      {kModuleFrozen, "module_frozen",
       "no gradient comes there: the module's parameters are frozen, all of them, but what is "
       "before it needs a gradient through it"},
      {kOutputDetached, "output_detached",
       "no gradient comes there: the output is detached, or made without a graph"},
      {kInputBufferReused, "pp_input_buffer_reused",
       "pp rank {pp_rank} reads the input of micro-batch {read} in the backward of micro-batch "
       "{micro_batch}: the buffer that it got its own in was used again before"},
      {kWrongBetweenStages, "pp_gradient_wrong_between_ranks",
       "wrong between pp ranks {other_pp_rank} and {pp_rank}{?in_micro_batches}: {last_right} is "
       "the last right tensor; did a buffer change while it was sent, or one that backward still "
       "reads?"},
      {kReceivedOther, "pp_received_other_values",
       "pp rank {pp_rank} received something other than what pp rank {other_pp_rank} "
       "made{?in_micro_batches}, or computes with it wrongly: {last_right} is the last right "
       "tensor there; did the buffer change while it was sent?"},
      // ---- stale ----
      {kStaleBySteps, "stale_by_steps", "stale by {steps} step{steps:s}{on_ranks}"},
      {kMicroBatchOfStepBefore, "stale_micro_batch_of_step_before",
       "stale: the values of micro-batch {micro_batch} of the step before{on_ranks}"},
      {kValuesOfMicroBatch, "values_of_other_micro_batch",
       "micro-batch {micro_batch} has the values of micro-batch {other}{?before}{on_ranks}"},
      {kMasksOfMicroBatch, "masks_of_other_micro_batch",
       "micro-batch {micro_batch} has the masks of micro-batch {other}{?of_step}{on_ranks}"},
      {kMasksOfMicroBatches, "masks_of_several_micro_batches",
       "samples {first_samples} of micro-batch {micro_batch} have masks of other "
       "micro-batches{on_ranks}"},
      {kMasksOfSamples, "masks_of_other_samples",
       "samples {first_samples} of micro-batch {micro_batch} have the masks of samples "
       "{first_others} of micro-batch {other}{?of_step}{on_ranks}"},
      {kNotCleared, "gradient_not_cleared",
       "reference + {?times_words}the gradient of step {step}: not cleared{on_ranks}"},
      // ---- step ----
      {kNotUpdated, "not_updated", "not updated (bitwise as before){on_ranks}{?owner}"},
      {kAsBeforeStep, "as_before_step", "not updated (as before the step){on_ranks}"},
      {kRowsNotUpdated, "rows_not_updated",
       "rows {runs} not updated (as before the step), the others right{on_ranks}{?owner}"},
      {kStepOfOwnMatrix, "step_of_own_matrix",
       "each rank's step is made of its part of the gradient as a matrix, such as Muon's "
       "orthogonalized one; the right step is made of the whole matrix and cut then{?on_ranks}"},
      {kColumnsNotUpdated, "columns_not_updated",
       "columns {runs} not updated (as before the step), the others right{on_ranks}{?owner}"},
      {kRunNotUpdated, "run_of_elements_not_updated",
       "{which} of {elements} not updated (as before the step), the others "
       "right{on_ranks}{?owner}"},
      {kElementsNotUpdated, "elements_not_updated",
       "{kept} of {elements} elements not updated (as before the step), the others "
       "right{on_ranks}"},
      {kDecayWithRateOfSettings, "decay_with_rate_of_settings",
       "weight decay {decay:.3g} is applied with the learning rate {used:.3g} of the settings, "
       "where the schedule has {rate:.3g}{on_ranks}"},
      {kDecayWithRateOfStep, "decay_with_rate_of_other_step",
       "weight decay {decay:.3g} is applied with the learning rate of step {step}, {used:.3g}, "
       "where that of the step is {rate:.3g}{on_ranks}"},
      {kDecayWithoutRate, "decay_without_rate",
       "weight decay {decay:.3g} is applied with no learning rate{on_ranks}"},
      {kDecayLeftOut, "decay_left_out",
       "weight decay ({rate:.3g} x {decay:.3g}) is left out{on_ranks}"},
      {kDecayAppliedTwice, "decay_applied_twice",
       "weight decay ({rate:.3g} x {decay:.3g}) is applied twice{on_ranks}"},
      {kDecayAppliedTimes, "decay_applied_other_times",
       "weight decay ({rate:.3g} x {decay:.3g}) is applied {times:.3g} times{on_ranks}"},
      // ---- tensor ----
      {kPartsOutOfOrder, "parts_out_of_rank_order",
       "{where} use parts {parts} of {tensor}, expected {expected}"},
      {kShardsOfOtherRank, "shards_of_other_rank",
       "{fused}shards of {where} equal the shard of rank {coordinate}"},
      {kCutAsOneBlock, "cut_as_one_block",
       "shard of {axis} rank {coordinate} holds {slices} {first} to {last} of the whole: cut as "
       "one block, where {sections} sections must each be cut"},
      {kCutAsOneWithOther, "cut_as_one_block_with_other",
       "shard of {axis} rank {coordinate} holds rows {first} to {last} of {holder}: cut as one "
       "block with {other}, where each must be cut"},
      {kNotSlices, "not_slices_of_reference",
       "{what} of {where} are not slices of the reference{others}"},
      {kUpdateWithRateOfStep, "update_with_rate_of_other_step",
       "{before}scale {scale:.4g}: the learning rate of step {step}{?on_ranks}"},
      {kSamplesMissing, "gradients_of_samples_missing",
       "gradients of some samples are missing (rows of {num_rows} of the {num_ids} ids in "
       "{record} are 0)"},
      {kInputSideOnly, "input_side_only",
       "only the input side is present (rows of the ids in {record}; {num_rows} other "
       "row{num_rows:s} {num_rows:is} 0)"},
      {kMixedDtypes, "mixed_dtypes", "dtype differs between ranks: {dtypes}{guess}"},
      {kStateInOtherDtype, "state_in_coarser_dtype",
       "{state} is kept in {dtype}, declared {declared}"},
      {kMastersInOtherDtype, "masters_in_coarser_dtype",
       "master weights are {dtype}, declared {declared}; update lost below half a {dtype} step"},
      {kParameterValuesAdded, "parameter_values_added", "reference + {times}parameter values"},
      {kParameterAddedTimes, "parameter_added_other_times",
       "off by {factor:.3g} x {word}{?formula}, the same for every token ({word} is {parameter})"},
      {kParameterNotAdded, "parameter_not_added",
       "off by {factor:.3g} x {word}: {word} is not added, the same for every token ({word} is "
       "{parameter})"},
      // ---- token ----
      {kPositionsRestart, "positions_restart",
       "positions restart on every cp rank: those of cp rank 1 are {places}, and only tokens "
       "whose place on their rank is that in the sequence are right"},
      {kWrongWithForeignKeys, "wrong_with_keys_of_other_ranks",
       "wrong on {where} where queries meet keys of other cp ranks; those that meet keys of "
       "their own rank only are right"},
      {kPositionsOff, "positions_off", "positions are off by {shift:g}{on_ranks}"},
      {kOtherFrequencies, "rotation_with_other_frequencies",
       "angles grow by other frequencies, off by up to {percent:.2g} %{on_ranks}"},
      {kFrequenciesRounded, "rotation_frequencies_rounded",
       "angles grow by other frequencies, off by up to {percent:.2g} %: they are rounded to "
       "{dtype}{on_ranks}"},
      {kOtherBase, "rotation_with_other_base",
       "angles grow by other frequencies, off by up to {percent:.2g} %: their base is "
       "{base:.6g}, not {right:.6g}{on_ranks}"},
      {kLastTargetsMissing, "last_targets_of_ranks_missing",
       "the tokens {positions} have no target: the last ones of the parts of cp ranks; shift "
       "labels before the sequence is cut"},
      {kMeanOfCpRankMeans, "mean_of_cp_rank_means",
       "the mean of the cp ranks' own means, not the mean of all tokens: each rank divides by "
       "its own count of targets"},
      // ---- vocabulary ----
      {kForeignIdsNotMasked, "foreign_ids_not_masked_in_backward",
       "row {row} holds what belongs to the rows that other ranks have: ids of theirs are not "
       "masked in backward{on_ranks}"},
      {kRowsWithoutGradient, "rows_without_gradient_not_zero",
       "rows of ids in {record} without a gradient, such as padding: {num_rows} row{num_rows:s} "
       "({first_rows}) must be 0 and {num_rows:is} not, the others are right{on_ranks}"},
      {kRowsOfAbsentIds, "rows_of_absent_ids_not_zero",
       "rows of ids that are not in {record}{?and_present}: {num_rows} row{num_rows:s} "
       "({first_rows}) must be 0 and {num_rows:is} not, the others are right{on_ranks}"},
      {kRepeatedIdsAveraged, "repeated_ids_averaged",
       "rows of the {num_rows} repeated ids in {record} are divided by how often they "
       "occur{on_ranks}"},
      {kRepeatedIdsNotSummed, "repeated_ids_not_summed",
       "repeated ids are not summed: rows of {num_rows} repeated ids in {record} have the "
       "gradient of {which} occurrence alone, the others are right{on_ranks}"},
      {kRowAddedToForeignIds, "row_added_to_foreign_ids",
       "{num_tokens} tokens of {num_ids} ids have row {row} of {parameter} added: a rank that "
       "does not hold their ids gives them a row instead of 0{on_ranks}"},
      {kRowsOfOtherIds, "rows_of_other_ids",
       "tokens of {num_ids} ids from {first} to {last} have row id {sign} {away} of "
       "{parameter}{on_ranks}"},
      {kForeignTargetsNotMasked, "foreign_targets_not_masked",
       "rows of the logits' gradient whose target other ranks hold are wrong at column {column} "
       "of a rank's part: targets of theirs are not masked{on_ranks}"},
      {kLogitRowsNotZero, "logit_rows_do_not_sum_to_zero",
       "rows of the logits' gradient do not sum to 0 ({off} of {num_rows} rows, up to "
       "{worst:.2g} of their absolute sum)"},
      {kTargetNotSubtracted, "target_not_subtracted",
       "rows of the logits' gradient do not sum to 0 ({off} of {num_rows} rows, up to "
       "{worst:.2g} of their absolute sum): the target's 1 is not subtracted"},
      {kSoftmaxOfOwnColumns, "softmax_of_own_columns",
       "rows of the logits' gradient do not sum to 0 ({off} of {num_rows} rows, up to "
       "{worst:.2g} of their absolute sum): each rank's columns have a softmax of their own"},
      {kUncountedTokens, "gradient_of_tokens_without_target",
       "{num_tokens} token{num_tokens:s} without a target {num_tokens:has} a gradient at the "
       "logits and should have none, the others are right{on_ranks}"},
      // ---- what a run repeats ----
      {kRecomputedMaskDiffers, "recomputed_mask_differs",
       "recomputed mask differs from the forward mask"},
      {kRecomputedActivationsDiffer, "recomputed_activations_differ",
       "computed again otherwise than in forward: {wrong} of {all} activations of that step"},
      {kRightAtEndOfStep, "right_at_end_of_step",
       "wrong after micro-batch {micro_batch}, right at the end of the step"},
      {kNotRepeatable, "not_repeatable",
       "not repeatable: run {run} of {subject} differs from run 1"},
      // ---- calls ----
      {kNoCallAlongAxis, "no_call_along_axis",
       "no call along {axis} is there, but along other axes: {calls} must be made, first "
       "{first}; is nothing exchanged there?"},
      {kCallMadeAgain, "call_made_again", "call {call} is made again"},
      // ---- tensors of checkpoints ----
      {kTensorsExchanged, "tensors_exchanged", "{first} and {second} are exchanged"},
      {kEqualsOtherTensor, "equals_other_tensor", "equals {tensor} of the reference"},
      {kTransposed, "transposed", "transposed"},
      {kHalvesExchanged, "halves_exchanged", "the halves of dim 0 are in the order {order}"},
      {kPartsInOtherOrder, "parts_in_other_order",
       "the {parts} parts of dim 0 are in the order {order}"},
      // ---- given by the Python package, or another program ----
      {kGivenCause, "given_cause", "{problem}"},
      {kNoDataSampler, "no_data_sampler",
       "the script has no DistributedSampler or other split of the batch over the data-parallel "
       "ranks"},
      {kOtherMicroBatches, "other_micro_batches",
       "both must make the same micro-batches: give --reference-command with arguments that do"},
      {kOwnSamplesOnEachRank, "own_samples_on_each_rank",
       "each rank draws samples of its own, so the single process must train on all {samples}"},
      {kBatchStatistics, "batch_statistics",
       "{module} normalizes by the samples of a batch ({modules} module{modules:s} in all), and "
       "each "
       "data-parallel rank has a batch of its own (BatchNorm in training). Use SyncBatchNorm on "
       "GPUs, GroupNorm, or eval() of these modules, in both runs."},
      {kMeanOfOwnLabels, "mean_of_own_labels",
       "the data-parallel ranks count {least} to {most} labels, and each takes the mean over its "
       "own. The single process takes the mean over all labels: weighted by their numbers the "
       "ranks' losses give its loss. Divide sums of losses by the number of labels of all ranks, "
       "times the ranks."},
      {kSamplesLeftOut, "samples_left_out",
       "a rank drops samples, or makes fewer micro-batches than its share"},
      {kFunctionWrong, "function_wrong",
       "of the functions that the module calls, the first wrong one shows in {tensor}{?cause}"},
      {kLossScaledOnRanks, "loss_scaled_on_ranks",
       "the loss of rank{ranks:s} {ranks} is scaled: its gradient at {output}, which is right, has "
       "the factor{factors:s} {factors:.6g}{?is_formula}"},
      {kLossDividedByOtherLabels, "loss_divided_by_labels_of_rank",
       "scale {scale:.4g}: every rank divides its loss by the {labels} labels of rank {rank}. "
       "The ranks count {all_labels} together"},
      {kLossWeightsOfMicroBatches, "loss_weights_of_micro_batches",
       "micro-batches enter the loss with other weights than in the single process: {weights}"},
      {kLossWeightsOfClasses, "loss_weights_of_classes",
       "the loss of rank{ranks:s} {ranks} weighs classes by other numbers: {least:.4g} to "
       "{most:.4g} times those of the single process"},
      {kLossOfOtherTokens, "loss_of_other_tokens",
       "the loss of rank{ranks:s} {ranks} counts {more} token{more:s} that the single process "
       "leaves out, and leaves out {fewer} that it counts"},
      {kLossOfOtherLabels, "loss_of_other_labels",
       "the loss of rank{ranks:s} {ranks} has other labels for {wrong} of {tokens} tokens{?moved}"},
      {kLossSmoothing, "loss_with_other_smoothing",
       "the loss of rank{ranks:s} {ranks} has label smoothing of {smoothing:.3g}, that of the "
       "single process {right:.3g}"},
      {kLossPenalizesLogits, "loss_penalizes_logits",
       "the loss of rank{ranks:s} {ranks} has a penalty on the squared logarithm of the sum of "
       "exponentials of {output} (z-loss), which the single process has not"},
      {kLossRounded, "loss_rounded_on_ranks",
       "the loss of rank{ranks:s} {ranks} is computed in {dtype}: its gradient at {output} has no "
       "more bits"},
      {kLossTermBesideOutput, "loss_term_beside_output",
       "the loss of rank{ranks:s} {ranks} is off by {offset:.4g}, though its gradient at {output} "
       "is right: it has a term that does not depend on {output}, such as a penalty on weights"},
      {kLossWrongOnRanks, "loss_wrong_on_ranks",
       "the loss of rank{ranks:s} {ranks} is another function of {output} than in the single "
       "process: the output is right, and the gradient of the loss there is wrong{?others}"},
      {kSamplesForeign, "samples_foreign",
       "{foreign} of {samples} samples on rank{ranks:s} {ranks} are nowhere in the reference's "
       "batch{?of_step}"},
      {kStepWithoutForward, "step_without_forward",
       "step {step} has no forward pass: the optimizer steps once more behind that of step "
       "{before}"},
      {kStepSkipped, "optimizer_step_skipped",
       "has the samples of steps {steps} of the reference: the optimizer does not step between "
       "them"},
      // ---- what ranks do, counted by the Python package ----
      {kSamplesCut, "samples_cut", "the rank cuts samples to another length than the others"},
      {kSamplesRepeatedToFill, "samples_repeated_to_fill",
       "a sampler repeats samples so that all ranks have as many, as DistributedSampler does "
       "without drop_last"},
      {kStepsOfRanksDiffer, "steps_of_ranks_differ",
       "whether and how often the optimizer steps depends on the rank, or on its own loss or data"},
      {kGradientsCleared, "gradients_cleared",
       "the rank clears its gradients between backward and step, or steps without backward"},
      {kReplicasTrainApart, "replicas_train_apart",
       "gradients are not reduced over the data-parallel ranks before each step"},
  });
}();
static_assert(is_complete(kCauses), "kCauses must have one row for each CauseId, in its order");

}  // namespace

std::span<const IdRow<CauseId>> rows_of(CauseId) noexcept {
  return kCauses;
}

Claim claim_of(CauseId id) noexcept {
  using enum CauseId;
  switch (id) {
    case kNone:
    case kValuesNotFinite:
    case kFlagOutOfRange:
    case kFlagWrongOnEveryRank:
    case kFlagNotReduced:
    case kLossScaleAfterOverflow:
    case kLossScaleChangedTwice:
    case kLossScaleWithoutOverflow:
    case kSamplerAhead:
    case kSamplerBehind:
    case kUpdatesMiscounted:
    case kStepNotSkipped:
    case kStateOfSkippedStep:
    case kUntrainedChanged:
    case kUntrainedDecayed:
    case kUntrainedScaled:
    case kIdsInOtherOrder:
    case kIdsRepeated:
    case kHyperparametersDiffer:
    case kNothingDropped:
    case kModuleFrozen:
    case kOutputDetached:
    case kMixedDtypes:
    case kStateInOtherDtype:
    case kMastersInOtherDtype:
    case kRecomputedMaskDiffers:
    case kRecomputedActivationsDiffer:
    case kRightAtEndOfStep:
    case kNotRepeatable:
    case kNoCallAlongAxis:
    case kCallMadeAgain:
    case kGivenCause:
    case kNoDataSampler:
    case kOtherMicroBatches:
    case kOwnSamplesOnEachRank:
    case kBatchStatistics:
    case kMeanOfOwnLabels:
    case kSamplesLeftOut:
    case kFunctionWrong:
    case kSamplesForeign:
    case kStepWithoutForward:
    case kStepSkipped:
    case kSamplesCut:
    case kSamplesRepeatedToFill:
    case kStepsOfRanksDiffer:
    case kGradientsCleared:
    case kReplicasTrainApart:
      return Claim::kFact;
    case kIdsOfEarlierStep:
    case kIdsTooLarge:
    case kIdsTooSmall:
    case kIdsMiscounted:
    case kValidTokensElsewhere:
    case kFewerValidTokens:
    case kMoreValidTokens:
      return Claim::kCounted;
    case kOptimizerStatesSwapped:
    case kOptimizerStateOfOther:
    case kOptimizerStateOfOtherKind:
    case kMasksOfOtherRank:
    case kNotUpdated:
    case kPartsOutOfOrder:
    case kShardsOfOtherRank:
    case kCutAsOneBlock:
    case kCutAsOneWithOther:
    case kStaleBySteps:
      return Claim::kSameBytes;
    case kLargestPart:
    case kSmallestPart:
    case kSumRoundedBetween:
    case kValuesOfOtherRanks:
    case kOneMaskForSamples:
    case kOneMaskForTokens:
    case kOneMaskForPlaces:
    case kGradientOfOtherActivation:
    case kValuesOfOtherTensor:
    case kWrongValuesOfOtherTensor:
    case kMasksOfOtherStep:
    case kOtherMaskSeed:
    case kRounded:
    case kSummandsRounded:
    case kMultipliedWithReciprocal:
    case kNotMultipliedWithReciprocal:
    case kMicroBatchSumsRounded:
    case kMastersCutOff:
    case kExponentialsOfRankRounded:
    case kExponentialsRounded:
    case kLogarithmRounded:
    case kMicroBatchOfStepBefore:
    case kValuesOfMicroBatch:
    case kMasksOfMicroBatch:
    case kMasksOfMicroBatches:
    case kMasksOfSamples:
    case kTensorsExchanged:
    case kEqualsOtherTensor:
    case kTransposed:
    case kHalvesExchanged:
    case kPartsInOtherOrder:
      return Claim::kOtherSource;
    case kScaleOfFormula:
    case kClippingNotApplied:
    case kClippedTwice:
    case kScaledUpToLimit:
    case kClippedByOtherNorm:
    case kRankLocalPartial:
    case kRankLocal:
    case kMeanOfShards:
    case kCausalMaskShowsNextToken:
    case kCausalMaskHidesOwnToken:
    case kCausalMaskShowsAllTokens:
    case kCpChunksInWrongOrder:
    case kOwnQueriesOnly:
    case kKvHeadsInTurn:
    case kScoresScaledByRoot:
    case kScoresScaledByRatio:
    case kFactorPerRankOfFormula:
    case kScaledByRankPlusOne:
    case kDividesByOwnCount:
    case kWeightedByOwnCount:
    case kMicroBatchMissing:
    case kMicroBatchRankLocal:
    case kPiecesRankLocal:
    case kTiedUseMissing:
    case kSquaresLeftOut:
    case kSquaresCountedTwice:
    case kSquaresOfCopiesCounted:
    case kStaleParametersRead:
    case kParametersOfAnother:
    case kPredecessorPadding:
    case kEpsInsideRoot:
    case kEpsInsideUncorrectedRoot:
    case kRootMissing:
    case kFirstMomentUncorrected:
    case kSecondMomentUncorrected:
    case kMomentsUncorrected:
    case kCorrectionOfOtherUpdate:
    case kOtherEps:
    case kDecayBehindStep:
    case kMeanOfRankMeans:
    case kReplicatedCountedOften:
    case kNormOfOneRank:
    case kReplicatedLeftOut:
    case kLargestElement:
    case kNormSquared:
    case kNormsAdded:
    case kNormsOfAxisAdded:
    case kSquaresNotSummed:
    case kPaddingInSoftmax:
    case kOffsetOfDegree:
    case kOffsetOfWidths:
    case kDividedByOtherCount:
    case kOwnLargestLogit:
    case kTargetsInFirstColumnLost:
    case kTargetsInLastColumnLost:
    case kSmoothingOverPadding:
    case kBackwardReadsEarlierWeight:
    case kBackwardReadsOtherWeight:
    case kBackwardReadsZerosInPart:
    case kBackwardReadsMovedParts:
    case kBackwardReadsZeros:
    case kInputBufferReused:
    case kStepOfOwnMatrix:
    case kDecayWithRateOfSettings:
    case kDecayWithRateOfStep:
    case kDecayWithoutRate:
    case kDecayLeftOut:
    case kDecayAppliedTwice:
    case kDecayAppliedTimes:
    case kUpdateWithRateOfStep:
    case kInputSideOnly:
    case kParameterValuesAdded:
    case kParameterAddedTimes:
    case kParameterNotAdded:
    case kPositionsRestart:
    case kPositionsOff:
    case kOtherFrequencies:
    case kFrequenciesRounded:
    case kOtherBase:
    case kLastTargetsMissing:
    case kMeanOfCpRankMeans:
    case kForeignIdsNotMasked:
    case kRowsWithoutGradient:
    case kRowsOfAbsentIds:
    case kRepeatedIdsAveraged:
    case kRepeatedIdsNotSummed:
    case kRowAddedToForeignIds:
    case kRowsOfOtherIds:
    case kForeignTargetsNotMasked:
    case kLogitRowsNotZero:
    case kTargetNotSubtracted:
    case kSoftmaxOfOwnColumns:
    case kUncountedTokens:
    case kRateOfOtherStep:
    case kLossScaledOnRanks:
    case kLossDividedByOtherLabels:
    case kLossWeightsOfMicroBatches:
    case kLossWeightsOfClasses:
    case kLossOfOtherTokens:
    case kLossOfOtherLabels:
    case kLossSmoothing:
    case kLossPenalizesLogits:
    case kLossRounded:
    case kMomentWithOtherFactors:
    case kMomentWithOtherBeta:
      return Claim::kRule;
    case kFactorPerRank:
    case kSummandFactors:
    case kMicroBatchWeights:
    case kNotCleared:
      return Claim::kFittedNumbers;
    case kScale:
    case kScaleNearOne:
    case kAsBeforeStep:
    case kRowsNotUpdated:
    case kColumnsNotUpdated:
    case kRunNotUpdated:
    case kElementsNotUpdated:
    case kSamplesMissing:
    case kLossTermBesideOutput:
      return Claim::kFittedNumber;
    case kConstantOffset:
    case kSameRowAdded:
    case kPartScaled:
    case kPartOffset:
    case kPartMoved:
    case kPartRounded:
    case kOneElementWrong:
    case kZeros:
      return Claim::kFittedPart;
    case kSlicesRepeated:
    case kSlicesShifted:
    case kSlicesPermuted:
    case kTokensElsewhere:
    case kPartNotReached:
      return Claim::kRearranged;
    case kTokensPermutedBetweenSamples:
    case kSameValuesElsewhere:
      return Claim::kScattered;
    case kPartWrong:
    case kNumberOff:
    case kNumbersOff:
    case kWrongBetweenStages:
    case kReceivedOther:
    case kNotSlices:
    case kWrongWithForeignKeys:
    case kLossWrongOnRanks:
      return Claim::kPlace;
    case kCopiesDifferOverAxes:
    case kEitherCopyWrong:
      return Claim::kDifference;
    case kEnd: break;
  }
  return Claim::kDifference;
}

}  // namespace isoshard
