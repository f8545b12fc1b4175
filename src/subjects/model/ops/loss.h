// SPDX-License-Identifier: Apache-2.0
/// The one cross-entropy of reference and subjects, for logits of a whole vocabulary and for logits
/// that are split along it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/comm/communicator.h"

namespace isoshard {

/// Targets for next-token prediction: labels moved one place to the left, -100 in the last column.
/// Shapes   int64 [B,S] -> int64 [B,S].
[[nodiscard]] at::Tensor shift_labels(const at::Tensor& labels_BS);

struct CrossEntropy {
  /// Scalar, fp32 (fp64 for fp64 logits), differentiable: sum over b of weight[b] * sum over t of
  /// loss[b,t].
  at::Tensor loss;
  at::Tensor sample_sum_B;    ///< detached, sum over t of loss[b,t]
  at::Tensor sample_count_B;  ///< int64, counted tokens
};

/// A rank's entries of the vocabulary: `count` true ones from `begin` on, of `whole`; its tensors
/// have `rows`, the rest is padding.
struct VocabShard {
  std::int64_t whole = 0, begin = 0, count = 0, rows = 0;
};

struct LossOptions {
  double label_smoothing = 0;  ///< in [0, 1)
  /// Tokens per block; 0: as many as have 2^22 logits. Changes no bit of the results.
  std::int64_t block_rows = 0;
  /// Whose ranks hold the other columns; nullptr: the logits have all columns.
  Communicator* tp = nullptr;
  VocabShard shard = {};  ///< with `tp`: the columns that these logits have
};

/// Cross-entropy of fp32 log-softmax (fp64 for fp64 logits), summed per sample and weighted.
///
/// With `label_smoothing` a, the loss of a token is (1 - s) (-log p[target]) + s mean over the V
/// entries of (-log p), s = a V / (V - 1): the target gets the probability 1 - a, every other entry
/// a / (V - 1).
///
/// Backward writes the gradient over the logits, block by block, so that nothing of their size is
/// made: the logits must not be read afterwards, and a second backward is refused by autograd.
///
/// With `tp` the logits are this rank's columns; columns beyond shard.count are padding, which
/// enters nothing and gets a gradient of zero. Logits of the whole vocabulary are computed as torch
/// does (one log_softmax kernel a block); split logits are computed from each row's maximum and sum
/// of exponentials, so the two differ by roundings (docs/reference/models.md has both in full).
///
/// Shapes   logits [B,S,V] (with tp: [B,S,shard.rows]); targets int64 [B,S] in the whole
///          vocabulary, -100 is not counted; weight [B] in fp64.
/// Ranks    collective over `tp`, one all-reduce of B x S numbers each: vocab_parallel.max,
///          .logsumexp (the sums of exponentials), .target and, with label_smoothing, .smoothing;
///          none in backward. Results are equal on all ranks.
/// Errors   ShapeError for logits, targets or weights of another shape or type, or a target outside
///          the vocabulary.
/// Source   torch.nn.functional.cross_entropy(reduction="sum") per sample; Megatron-LM
///          megatron/core/tensor_parallel/cross_entropy.py, whose label smoothing this is.
[[nodiscard]] CrossEntropy cross_entropy(const at::Tensor& logits_BSV, const at::Tensor& targets_BS,
                                         const at::Tensor& weight_B,
                                         const LossOptions& options = {});

}  // namespace isoshard
