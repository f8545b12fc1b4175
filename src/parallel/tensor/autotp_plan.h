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

/// Errors   UsageError with all numbers when `tp` does not divide the heads, the kv heads or the ffn size, or is < 1.
void check_autotp_degree(const ModelConfig& config, int tp);

}  // namespace isoshard
