// SPDX-License-Identifier: Apache-2.0
/// From a divergent tensor's bytes to a likely cause, in the words of the fault catalogue.
#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "harness/verdict/tensor_judge.h"

namespace isoshard::detail {

/// Places in the table of patterns.
using FittingPatterns = std::set<std::size_t>;

/// A tensor of more elements than this is searched only for what smaller ones have shown.
inline constexpr std::int64_t kLargeTensor = std::int64_t{1} << 24;

/// The likely cause of one tensor's divergence; empty if no pattern fits. A pattern fits when it
/// leaves less than a quarter of the error and no more than a few tolerances. The table of patterns
/// is in diagnosis.cc; the words of those by class stand in docs/detection.md, "Causes".
///
///   not updated (bitwise as before) | stale by n steps
///   optimizer state after load: STATE of A and B are swapped | after resume: masks of ranks a..b
///     equal the mask of rank r
///   valid tokens: n fewer than the reference | each id seen appears n = AXIS times | the same ids
///     in another order
///   equals the mean of n rank means | too small, too large: which squares the norm lacks or counts
///     twice
///   update scale k = formula | clipping not applied
///   only micro-batch m of 0..n is present | micro-batch m of 0..n is rank-local over AXIS |
///     micro-batches enter with weights
///   AXIS ranks r use one mask for different tokens
///   shards of AXIS ranks r equal the shard of rank q | shard of AXIS rank r holds rows a to b of
///     X: cut as one block
///   parameters read in step s: X stale by n steps on AXIS ranks r | gathered parameters: first n
///     elements of the weight after X are wrong
///   wrong values equal values of X from element n
///   rank-local partial over AXIS (n copies differ, their sum equals the reference)
///   rank-local over AXIS (n copies differ; combined they give the reference)
///   every shard is the mean of the n shards over AXIS
///   scale k = formula of the run's numbers: degrees, micro-batches, names of a tied weight, powers
///     of two
///   only the input side is present
///   [copies differ over AXIS; ] rank r holds positions a..b twice | shift n along dim d | permuted
///     along dim d
///   offset x: n columns of padding with logits of 0 take part in the softmax
///   constant offset x [= log(AXIS) | = log(padded/true), of a scalar] | off by k x bias | off by
///     the same row everywhere | permuted
///   AXIS ranks r use parts p of X, expected q | values of AXIS ranks r are not slices of the
///     reference
///   copies differ over AXIS
/// `reference_record` may stand for a record that the reference has not (wanted_of): then only a
/// factor is named.
/// `fitting`   of the tensors that were diagnosed before; the pattern that fits is added. Where
///             there is one, others are not tried on a tensor of more than kLargeTensor elements,
///             which would take minutes.
[[nodiscard]] std::string diagnose(const Reference& reference, const Record& reference_record,
                                   const Trace& actual, const std::vector<Held>& held,
                                   const TensorResult& result, const JudgePolicy& options,
                                   FittingPatterns& fitting);

/// The likely cause of a record that the reference has not: state of the optimizer in a step that
/// must be skipped. Empty for any other.
[[nodiscard]] std::string cause_of_unwanted(const Reference& reference, const RecordKey& key);

/// The likely cause of a record that no rank has; empty if nothing is known of it.
[[nodiscard]] std::string cause_of_missing(const Reference& reference, const Trace& actual,
                                           const RecordKey& key);

}  // namespace isoshard::detail
