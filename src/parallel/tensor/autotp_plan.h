// SPDX-License-Identifier: Apache-2.0
/// DeepSpeed AutoTP's choice of column- and row-parallel layers.
#pragma once
#include <span>

#include "model/config.h"
#include "parallel/tensor/shard_plan.h"

namespace isoshard {

/// o_proj and down_proj are row-parallel; q_proj, k_proj, v_proj, gate_proj and up_proj column-parallel; embedding, norms and head
/// are whole on every rank.
/// Source   DeepSpeed 0.19 module_inject/auto_tp.py (all-reduce linears by name; every other linear layer inside the blocks is
///          sliced along its output).
[[nodiscard]] ShardPlan autotp_plan(std::span<const ParameterSpec> specs);

/// The same for a model on `tp` ranks: where tp is above the number of kv heads, k_proj and v_proj are copied, one kv head per
/// rank, to tp / kv_heads neighbouring ranks each, so that a rank has the kv head of its query heads.
/// Errors   as check_autotp_degree.
/// Source   Megatron-LM, --num-query-groups below the tensor-parallel size (each query group on tp / groups ranks).
[[nodiscard]] ShardPlan autotp_plan(const Model& model, int tp);

/// Errors   UsageError with all numbers when `tp` does not divide the heads or the ffn size, when neither of tp and the kv heads
///          divides the other, or when tp is < 1.
void check_autotp_degree(const ModelConfig& config, int tp);

}  // namespace isoshard
