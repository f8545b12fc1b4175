// SPDX-License-Identifier: Apache-2.0
/// The loss of lattice models: it adds nothing that is not exactly representable.
#pragma once
#include <ATen/core/Tensor.h>

#include "subjects/model/ops/loss.h"

namespace isoshard {

/// Minus the logit of each counted target, summed per sample and weighted. Its gradient is -weight
/// at the targets and 0 elsewhere.
///
/// With `options.tp` the logits are this rank's columns (as for cross_entropy): each rank picks the
/// targets that it has, and what they picked is added over tp.
///
/// Shapes        logits [B,S,V] (with tp: [B,S,shard.rows]); targets int64 [B,S], -100 is not
///               counted; weight [B] in fp64.
/// Ranks         collective over `options.tp`: one all-reduce of B x S numbers
///               (vocab_parallel.target).
/// Errors        ShapeError if the shapes do not fit or a target is outside the vocabulary.
/// Determinism   exact in every order while the sums fit in fp64 and each weight in the logits'
///               dtype.
[[nodiscard]] CrossEntropy linear_loss(const at::Tensor& logits_BSV, const at::Tensor& targets_BS,
                                       const at::Tensor& weight_B, const LossOptions& options = {});

}  // namespace isoshard
