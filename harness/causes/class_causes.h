// SPDX-License-Identifier: Apache-2.0
/// Causes by class: what goes wrong in the same way in many places, whatever tensor shows it. Each
/// function returns the cause, or none if its pattern does not fit. harness/ids/cause_notes.cc says
/// of each cause what it needs, and what looks like it and is not.
#pragma once
#include <string>

#include "harness/causes/view/evidence.h"

namespace isoshard::detail {

/// Ranks that hold a tensor in different dtypes, as where some of them enter autocast or cast their
/// model and others do not.
[[nodiscard]] Cause cause_mixed_dtypes(const Evidence& e);
/// A parameter whose bytes are those of its record before, on every rank where it diverges.
[[nodiscard]] Cause cause_not_updated(const Evidence& e);
/// State of the optimizer whose bytes are those of the step before, where it diverges.
[[nodiscard]] Cause cause_state_as_before(const Evidence& e);
/// A part of a parameter is as before its step, the rest is right: which rows, columns or elements,
/// and whose part they are.
[[nodiscard]] Cause cause_part_not_updated(const Evidence& e);
/// A step of a parameter that lacks the weight decay, or has it twice.
[[nodiscard]] Cause cause_weight_decay(const Evidence& e);
/// What a step changes that must be skipped, as its gradients overflow.
[[nodiscard]] Cause cause_not_skipped(const Evidence& e);
/// A moment of the optimizer, or its momentum, in which the one before or the gradient has another
/// factor.
[[nodiscard]] Cause cause_in_moments(const Evidence& e);
/// A step that AdamW does not make of right moments: another eps, or bias correction.
[[nodiscard]] Cause cause_in_rule(const Evidence& e);
/// A parameter that has no gradient and is changed by a step.
[[nodiscard]] Cause cause_of_untrained(const Evidence& e);
/// Equal to the reference's value of an earlier step or of another micro-batch.
[[nodiscard]] Cause cause_stale(const Evidence& e);
/// A gradient with a multiple of an earlier step's added, which was left in its place.
[[nodiscard]] Cause cause_not_cleared(const Evidence& e);
/// Masks of other samples, micro-batches or steps.
[[nodiscard]] Cause cause_other_masks(const Evidence& e);
/// Elements that are 0 and should not be; the others are right.
[[nodiscard]] Cause cause_zeros(const Evidence& e);
/// Values, or the summands of a mean over dp, that were rounded to a coarser dtype.
[[nodiscard]] Cause cause_rounding(const Evidence& e);
/// Parameters that are their masters cut off to the parameters' dtype, not rounded.
[[nodiscard]] Cause cause_cut_off_master(const Evidence& e);
/// A mean over dp whose sums are multiplied with a rounded reciprocal, not divided.
[[nodiscard]] Cause cause_reciprocal(const Evidence& e);
/// Sums over micro-batches, of each rank's own samples, that were rounded to a coarser dtype.
[[nodiscard]] Cause cause_rounded_sums(const Evidence& e);
/// Sums over micro-batches that were rounded to a coarser dtype before the next one was added.
[[nodiscard]] Cause cause_rounded_between(const Evidence& e);
/// Each rank's part has a factor of its own.
[[nodiscard]] Cause cause_rank_factors(const Evidence& e);
/// What backward begins from has a factor of its own on each dp rank.
[[nodiscard]] Cause cause_backward_parts(const Evidence& e);
/// A sum of earlier activations whose summands have other factors than 1.
[[nodiscard]] Cause cause_summands(const Evidence& e);
/// Rows of a vocabulary: of ids that are not in the batch, of repeated ids, of another id.
[[nodiscard]] Cause cause_vocabulary_rows(const Evidence& e);
/// Rows of a logit gradient that do not sum to 0.
[[nodiscard]] Cause cause_logit_rows(const Evidence& e);
/// A loss whose label smoothing counts columns that pad the vocabulary.
[[nodiscard]] Cause cause_smoothed_columns(const Evidence& e);
/// A loss whose columns tp ranks share out, each with the largest logit of its own, or without the
/// targets at a border.
[[nodiscard]] Cause cause_in_split_loss(const Evidence& e);
/// The gradient of a vector that is the largest of ranks' parts, element by element, not their sum.
[[nodiscard]] Cause cause_largest_part(const Evidence& e);
/// A loss, or its gradient at the logits, whose sums of exponentials were rounded.
[[nodiscard]] Cause cause_rounded_exponentials(const Evidence& e);
/// A gradient at the logits of tokens that have no target.
[[nodiscard]] Cause cause_uncounted_tokens(const Evidence& e);
/// What another rank should hold.
[[nodiscard]] Cause cause_other_ranks(const Evidence& e);
/// Slices along one dim stand at other positions: repeated, shifted or permuted. Said for the ranks
/// that share the first bad rank's place, because their copies should be equal.
[[nodiscard]] Cause cause_moved_slices(const Evidence& e);
/// The right values, each as often as it should be, at other places.
[[nodiscard]] Cause cause_same_values_elsewhere(const Evidence& e);
/// A gradient norm that lacks the squares of some parameters or ranks, or counts them twice.
[[nodiscard]] Cause cause_norm_squares(const Evidence& e);
/// Sample ids: of an earlier step, shifted, seen twice or never.
[[nodiscard]] Cause cause_sample_ids(const Evidence& e);
/// Inputs of samples that the reference's batch has not, or that are floating-point numbers and
/// stand in another order, or more than once.
[[nodiscard]] Cause cause_in_samples(const Evidence& e);
/// A flag, such as found_inf: which ranks have another one.
[[nodiscard]] Cause cause_flag(const Evidence& e);

/// Each copy is one rank's share of the value: the sum over an axis, or a combination of all
/// copies, gives the reference.
[[nodiscard]] Cause cause_rank_local(const Evidence& e);
/// Ranks hold different parts, and each of them the mean of all parts.
[[nodiscard]] Cause cause_mean_of_shards(const Evidence& e);
/// One factor for everything: needs no bytes.
[[nodiscard]] Cause cause_scale(const Evidence& e);
/// Off by a constant, or by one row everywhere.
[[nodiscard]] Cause cause_offset(const Evidence& e);
/// A part that is multiplied, offset, moved or rounded while the rest is right; the same of what a
/// step adds to a parameter or its master, there also to all of it. A single wrong element has a
/// factor and an offset as alternatives. An activation or its gradient may also be changed
/// everywhere: 0, one multiple of the right one, or off by a constant.
[[nodiscard]] Cause cause_changed_part(const Evidence& e);

/// All wrong elements are in one part, and nothing simple was done to it. Says where, not why.
[[nodiscard]] Cause cause_wrong_part(const Evidence& e);

/// Copies that differ in runs of elements alone, which are right on one of the ranks.
[[nodiscard]] Cause cause_part_differs(const Evidence& e);
/// Whether copies differ within the tolerance and none of them can be taken as right: there is no
/// majority, and none is much nearer to the reference than the others.
[[nodiscard]] bool is_any_copy_wrong(const Evidence& e);
/// One number, such as a loss or a norm, that is off. It has a factor and an offset as
/// alternatives.
[[nodiscard]] Cause cause_number_off(const Evidence& e);
/// That copies differ, and over what.
[[nodiscard]] Cause cause_differing_copies(const Evidence& e);

}  // namespace isoshard::detail
