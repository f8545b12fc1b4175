// SPDX-License-Identifier: Apache-2.0
/// Megatron-Core's choice of what is split over tp.
#pragma once
#include "subjects/parallel/tensor/shard_plan.h"

namespace isoshard {

/// Column- and row-parallel layers as autotp_plan has them; embedding and head are always split
/// along the vocabulary, which is padded to a multiple of max(1, make_vocab_size_divisible_by) x
/// tp. (Upstream's own multiple is 128.)
/// Errors   as autotp_plan.
/// Source   Megatron-Core 0.19, models/gpt/gpt_model.py; --make-vocab-size-divisible-by.
[[nodiscard]] ShardPlan megatron_plan(const Model& model, int tp,
                                      std::int64_t make_vocab_size_divisible_by = 0);

}  // namespace isoshard
