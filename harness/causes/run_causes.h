// SPDX-License-Identifier: Apache-2.0
/// Causes that show only beside other records of the run: data ids, norms, earlier parameters,
/// micro-batches. Each function returns the cause, or none if its pattern does not fit.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "harness/causes/view/evidence.h"

namespace isoshard::detail {

/// The counted targets of each of `n` equal runs of rows of the step's labels; empty if there are
/// no labels, or rows that do not divide.
[[nodiscard]] std::vector<double> counted_targets(const Evidence& e, std::int64_t n);

/// Data ids: repeated, reordered, or fewer that count (a label below 0 does not).
[[nodiscard]] Cause cause_in_data(const Evidence& e);
/// A scalar: the mean of means, a norm that lacks or repeats squares, a factor or an offset of the
/// run's numbers.
[[nodiscard]] Cause cause_in_scalars(const Evidence& e);
/// The gradient of what a linear module reads: made with another weight than forward's, as shards
/// may be gathered once more for backward.
[[nodiscard]] Cause cause_in_weights_of_backward(const Evidence& e);
/// A loss scale that grows, shrinks or stays where it should not.
[[nodiscard]] Cause cause_in_loss_scale(const Evidence& e);
/// Optimizer state that is kept in a coarser dtype than the reference's.
[[nodiscard]] Cause cause_in_dtype(const Evidence& e);
/// What a run had when it was saved, and not when it had been loaded: state of another parameter,
/// masks of another rank.
[[nodiscard]] Cause cause_in_loading(const Evidence& e);
/// Whether a record of a parameter is that of a subject that has loaded the step's state: nothing
/// was stepped between it and the one before.
[[nodiscard]] bool is_of_loading(const RecordKey& key);
/// How far a run has come: updates that are not counted, another stream of masks, samples that come
/// later.
[[nodiscard]] Cause cause_in_progress(const Evidence& e);
/// The first number of a group of parameters that is another one than in the reference.
[[nodiscard]] Cause cause_in_hyperparameters(const Evidence& e);
/// A gradient with the parameter's own values added: its buffer held them before.
[[nodiscard]] Cause cause_in_buffer(const Evidence& e);
/// A parameter after a step: the step it made is a multiple of the right one.
[[nodiscard]] Cause cause_in_update(const Evidence& e);
/// A parameter after a step whose ranks computed with their part of a matrix what is to be computed
/// with all of it: the step has the singular vectors of the gradient's part, and the right step
/// those of the gradient.
[[nodiscard]] Cause cause_of_own_matrices(const Evidence& e);
/// A gradient: some micro-batches are missing, weighted wrongly, or not averaged over an axis. The
/// gradient is put together from the reference's activations and their gradients, where they
/// explain it: those of the parameter's module and of its input.
[[nodiscard]] Cause cause_in_micro_batches(const Evidence& e);
/// A gradient whose rows are there for the ids of the batch only.
[[nodiscard]] Cause cause_in_rows(const Evidence& e);
/// An activation of tokens that cp ranks share: positions restart on each rank, or only queries
/// that meet keys of other ranks are wrong.
[[nodiscard]] Cause cause_in_tokens(const Evidence& e);
/// Rotated queries or keys whose input is right: their positions are off, or their frequencies.
[[nodiscard]] Cause cause_in_rotation(const Evidence& e);
/// A loss of tokens that cp ranks share: the last token of each rank's chunk is not counted.
[[nodiscard]] Cause cause_in_targets(const Evidence& e);
/// Ids that are the right ones in another order, or some of them, each as often as the others. What
/// has an id is called `items`.
[[nodiscard]] Cause cause_of_repeats(const Evidence& e, const Values& expected,
                                     const Values& actual, std::string_view items);
/// Anything of a step that the run makes without a forward pass.
[[nodiscard]] Cause cause_without_forward(const Evidence& e);
/// A loss, or the gradient at logits, that counts samples with other weights: those of some
/// micro-batches, or of each rank's own count of tokens.
[[nodiscard]] Cause cause_sample_weights(const Evidence& e);
/// An activation or its gradient that is the first of a pipeline's rank: what came from the other
/// rank was right there.
[[nodiscard]] Cause cause_in_handover(const Evidence& e);
/// The gradient of keys or values, to which queries of other cp ranks give nothing.
[[nodiscard]] Cause cause_own_queries(const Evidence& e);
/// The core of attention over the keys of cp ranks that come together in another order.
[[nodiscard]] Cause cause_in_key_order(const Evidence& e);
/// The core of attention whose causal mask lets each query see a token more or less, or all.
[[nodiscard]] Cause cause_in_causal_mask(const Evidence& e);
/// The output of an attention: its scores are a multiple of the right ones. It is computed again
/// from the reference's queries, keys and values, where these are small.
[[nodiscard]] Cause cause_in_scores(const Evidence& e);
/// A loss of tokens that cp ranks share: each rank divides by its own count.
[[nodiscard]] Cause cause_in_rank_means(const Evidence& e);
/// A mask: ranks draw the same bits for different places.
[[nodiscard]] Cause cause_in_masks(const Evidence& e);
/// A module's output: it read its parameters as an earlier step left them, or those of another
/// module, or the first elements of one hold what pads its predecessor.
[[nodiscard]] Cause cause_in_weights_read(const Evidence& e);
/// The values of another tensor of the same kind, step and micro-batch.
[[nodiscard]] Cause cause_other_tensor(const Evidence& e);
/// A gradient, or a parameter after its step, that holds values of another one.
[[nodiscard]] Cause cause_in_other_gradients(const Evidence& e);
/// Weights as read, bit by bit: the shard of another rank, or the share of several parts that were
/// cut as one.
[[nodiscard]] Cause cause_in_shards(const Evidence& e);
/// Weights that are no part of the reference's, or values that were made from parts held out of
/// rank order.
[[nodiscard]] Cause cause_in_places(const Evidence& e);
/// Parts of an earlier tensor of the module, held out of rank order by just the ranks that are
/// wrong.
[[nodiscard]] Cause cause_in_order_of_parts(const Evidence& e);
/// "off by 2 x bias = (tp - 1) x bias, the same for every token (bias is NAME)", if `row` is a
/// multiple of a parameter.
[[nodiscard]] Cause multiple_of_parameter(const Evidence& e, const Values& row);

}  // namespace isoshard::detail
