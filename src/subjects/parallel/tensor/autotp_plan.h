// SPDX-License-Identifier: Apache-2.0
/// DeepSpeed AutoTP's choice of column- and row-parallel layers.
#pragma once
#include "subjects/model/config/config.h"
#include "subjects/parallel/tensor/shard_plan.h"

namespace isoshard {

/// Every linear layer inside the blocks is split as the model's own TpSplit says (column: q, k, v,
/// gate, up and their fused or transposed forms; row: what follows them); norms and positions are
/// whole on every rank. So are embedding and head with a `make_vocab_size_divisible_by` of 0. Above
/// 0 they (a tied head too) are split along the vocabulary, padded to a multiple of
/// make_vocab_size_divisible_by x tp.
///
/// Where tp is above the number of kv heads, k and v projections are copied, one kv head per rank,
/// to tp / kv_heads neighboring ranks each, so that a rank has the kv head of its query heads.
/// Errors   as check_autotp_degree; UsageError for a negative make_vocab_size_divisible_by.
/// Source   DeepSpeed 0.19 module_inject/auto_tp.py (all-reduce linears by name; every other linear
///          layer inside the blocks is sliced along its output); Megatron-LM, --num-query-groups
///          below the tensor-parallel size (each query group on tp / groups ranks),
///          --make-vocab-size-divisible-by.
[[nodiscard]] ShardPlan column_row_plan(const Model& model, int tp,
                                        std::int64_t make_vocab_size_divisible_by = 0);

/// The same, but that a single rank keeps its row layers as they were: nothing is summed, so the
/// bias is not added apart from the product.
[[nodiscard]] ShardPlan autotp_plan(const Model& model, int tp,
                                    std::int64_t make_vocab_size_divisible_by = 0);

/// Errors   UsageError with all numbers when `tp` does not divide the heads or the ffn size, when
///          neither of tp and the kv heads divides the other, when kv heads would have to be copied
///          out of a weight that fuses them with q, or when tp is < 1.
void check_autotp_degree(const Model& model, int tp);

}  // namespace isoshard
