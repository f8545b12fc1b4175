// SPDX-License-Identifier: Apache-2.0
/// Causal attention block by block of keys: what ring attention computes of each block, and how
/// results are merged. No communication.
///
/// B batch, N query heads, K kv heads, Q queries, T keys of the block, D head dim. "Wide" is fp64
/// for fp64, fp32 for all other dtypes.
#pragma once
#include <ATen/core/Tensor.h>

namespace isoshard {

/// A causal mask by places: a query sees the keys at its own place and before.
struct BlockPlaces {
  at::Tensor queries_Q, keys_T;  ///< int64
};

/// Of a block: softmax over its keys alone, and the logarithm of the sum of exponentials. A query
/// that sees no key of it has 0 and -inf.
struct BlockAttention {
  at::Tensor out_BNQD;  ///< in the dtype of the queries, as a kernel gives it
  at::Tensor lse_BNQ1;  ///< wide
};
/// Shapes   q [B,N,Q,D]; k, v [B,K,T,D] with K dividing N.
/// Errors   ShapeError if K does not divide N.
[[nodiscard]] BlockAttention block_attention(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, const BlockPlaces& places);

/// The result of blocks so far and one more: out - sigmoid(block.lse - lse) (out - block.out), and
/// lse - logsigmoid(lse - block.lse).   Requires   every query sees a key of the blocks so far.
/// `out` has the dtype in which results are merged.
/// Source   torch/distributed/tensor/experimental/_attention.py (_SDPAMerger).
void merge_block(at::Tensor& out_BNQD, at::Tensor& lse_BNQ1, const BlockAttention& block);

/// What a block adds to the gradients, wide.
struct BlockGradients {
  at::Tensor q_BNQD, k_BKTD, v_BKTD;
};
/// `out`, `lse` and `gradient` (of out) are those of all blocks.
[[nodiscard]] BlockGradients block_gradients(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, const BlockPlaces& places,
                                             const at::Tensor& out, const at::Tensor& lse,
                                             const at::Tensor& gradient);

/// Whether any query sees any key.
[[nodiscard]] bool sees_any(const BlockPlaces& places);

}  // namespace isoshard
