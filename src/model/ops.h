// SPDX-License-Identifier: Apache-2.0
/// The ops of transformer models, each in the precision and order of operations of Hugging Face transformers.
///
/// B batch, S sequence, H hidden, N heads, K kv heads, D head dim. "fp32" below reads fp64 for fp64 tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "model/config.h"

namespace isoshard {

/// The dtype of the parts that are computed in fp32 whatever the model's dtype: fp64 for fp64, fp32 for everything else.
[[nodiscard]] at::ScalarType wide_type(at::ScalarType dtype) noexcept;

/// weight * (x / rms(x)), the quotient in fp32 and rounded to x's dtype before the product.
/// Shapes   x [..., H], weight [H].
/// Source   transformers Qwen2RMSNorm.forward.
[[nodiscard]] at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// cos and sin of position times frequency.
struct RotaryTables {
  at::Tensor cos_SD, sin_SD;
};

/// Tables for positions 0 to length - 1: frequencies rounded to fp32 (also for fp64, as transformers keeps its buffer),
/// angles, cos and sin in fp32, rounded to `dtype`.
/// Source   transformers Qwen2RotaryEmbedding.
[[nodiscard]] RotaryTables rotary_tables(const RopeConfig& rope, std::int64_t head_dim, std::int64_t length, at::ScalarType dtype);

/// x * cos + rotate_half(x) * sin.   Shapes   x [B,N,S,D].
[[nodiscard]] at::Tensor apply_rotary(const at::Tensor& x_BNSD, const RotaryTables& tables);

/// Each kv head repeated for the query heads that share it.   Shapes   [B,K,S,D] -> [B,K*groups,S,D].
[[nodiscard]] at::Tensor repeat_kv(const at::Tensor& x_BKSD, std::int64_t groups);

/// Softmax attention under a causal mask, scaled by 1 / sqrt(D).
///
/// kEager: matmul, mask with the dtype's lowest number, softmax in fp32 rounded to the dtype, matmul. kSdpa:
/// at::scaled_dot_product_attention.
/// Shapes   q [B,N,S,D]; k, v [B,K,S,D] with K dividing N; returns [B,S,N*D], contiguous.
/// Errors   ShapeError if K does not divide N.
/// Source   transformers eager_attention_forward, sdpa_attention_forward.
[[nodiscard]] at::Tensor causal_attention(const at::Tensor& q_BNSD, const at::Tensor& k_BKSD, const at::Tensor& v_BKSD, AttentionImpl impl);

}  // namespace isoshard
