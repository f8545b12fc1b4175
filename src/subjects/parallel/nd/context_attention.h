// SPDX-License-Identifier: Apache-2.0
/// Attention of tokens that are split over cp ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"
#include "subjects/model/strategy.h"
#include "subjects/parallel/nd/context_split.h"

namespace isoshard {

/// Keys and values of all tokens, in the order of the tokens. Backward returns the sum of the
/// ranks' gradients for the own tokens, in the gradients' dtype.
///
/// Shapes   [B,K,S / cp,D] -> [B,K,S,D].
/// Ranks    collective over `cp`: one all-gather (ring_kv), in backward one reduce-scatter
///          (ring_dkv); one segment, named `module`. `cp` and `split` must outlive the graph.
[[nodiscard]] KeysValues gathered_context(const KeysValues& own, const ContextSplit& split,
                                          Communicator& cp, std::string_view module);

/// Causal softmax attention of the own queries over all keys, which go round the ranks: in turn j
/// rank r has the keys of rank r - j. A block that no own query sees is left out.
///
/// Values       blocks as block_attention has them, from the own one on; merged in `merge_dtype`
///              (none: fp32, fp64 for fp64), rounded to the dtype at the end.
/// Gradients    of queries are added up block by block; those of a block's keys and values start as
///              their owner's, and each further rank adds its own. All sums are in fp32 (fp64).
/// Shapes       q [B,N,S / cp,D]; k, v [B,K,S / cp,D]; returns [B,S / cp,N D], contiguous.
/// Ranks        collective over `cp`: cp - 1 exchanges with both neighbors (ring_kv); in backward
///              as many, and cp exchanges of the gradients (ring_dkv). `cp` and `split` must
///              outlive the graph.
/// Source       Liu et al., Ring Attention with Blockwise Transformers (2023);
///              torch/distributed/tensor/experimental/_attention.py.
[[nodiscard]] at::Tensor ring_attention(const at::Tensor& q_BNSD, const KeysValues& own,
                                        const ContextSplit& split, Communicator& cp,
                                        std::optional<Dtype> merge_dtype, std::string_view module);

}  // namespace isoshard
