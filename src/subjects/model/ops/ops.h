// SPDX-License-Identifier: Apache-2.0
/// The ops of transformer models, each in the precision and order of operations of Hugging Face
/// transformers.
///
/// B batch, S sequence, H hidden, N heads, K kv heads, D head dim. "fp32" below reads fp64 for fp64
/// tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>

#include "subjects/model/config/config.h"

namespace isoshard {

/// The dtype of the parts that are computed in fp32 for every dtype of the model: fp64 for fp64,
/// fp32 for everything else.
[[nodiscard]] at::ScalarType wide_type(at::ScalarType dtype) noexcept;

/// weight * (x / rms(x)), the quotient in fp32 and rounded to x's dtype before the product.
/// Shapes   x [..., H], weight [H].
/// Source   transformers Qwen2RMSNorm.forward.
[[nodiscard]] at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// Mean and variance over the last dim, in one kernel.   Shapes   x [..., H], weight and bias [H].
/// Source   torch.nn.LayerNorm.
[[nodiscard]] at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& bias, double eps);

/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), each op rounded to x's dtype.
/// Source   transformers NewGELUActivation.
[[nodiscard]] at::Tensor gelu_new(const at::Tensor& x);

/// cos and sin of position times frequency: [S,D], or of samples with positions of their own
/// [B,1,S,D].
struct RotaryTables {
  at::Tensor cos_SD, sin_SD;
};

/// Tables for positions 0 to length - 1, or of these those of `positions`, int64 [S] or [B,S]:
/// frequencies rounded to fp32 (also for fp64, as transformers keeps its buffer), angles, cos and
/// sin in fp32, rounded to `dtype`. Source   transformers Qwen2RotaryEmbedding; for llama3
///          modeling_rope_utils._compute_llama3_parameters.
[[nodiscard]] RotaryTables rotary_tables(const RopeConfig& rope, std::int64_t head_dim,
                                         std::int64_t length, at::ScalarType dtype,
                                         const at::Tensor& positions = {});

/// x * cos + rotate_half(x) * sin.   Shapes   x [B,N,S,D].
[[nodiscard]] at::Tensor apply_rotary(const at::Tensor& x_BNSD, const RotaryTables& tables);

/// Each kv head repeated for the query heads that share it.   Shapes   [B,K,S,D] ->
/// [B,K*groups,S,D].
[[nodiscard]] at::Tensor repeat_kv(const at::Tensor& x_BKSD, std::int64_t groups);

/// What the softmax of eager attention is computed in. kWide: fp32, rounded to the dtype (Qwen,
/// Llama). kModel: the model's dtype, one kernel (GPT-2); the two differ in backward, where kModel
/// has rounded weights only.
enum class SoftmaxDtype : std::uint8_t { kWide, kModel };

/// A function of the softmax's result before it is multiplied with the values; if empty, the result
/// stays as it is.
using AttentionDropout = std::function<at::Tensor(const at::Tensor& weights_BNSS)>;

/// Softmax attention under a causal mask, scaled by 1 / sqrt(D).
///
/// kEager: matmul, mask with the dtype's lowest number, softmax, dropout, matmul. kSdpa:
/// at::scaled_dot_product_attention.
/// Shapes   q [B,N,S,D]; k, v [B,K,S,D] with K dividing N; returns [B,S,N*D], contiguous. With
///          `query_positions` int64 [Q] queries q [B,N,Q,D] are those of these tokens, and the
///          result is [B,Q,N*D].
/// Errors   ShapeError if K does not divide N; UsageError for kSdpa with dropout, as that kernel
///          draws a mask of its own.
/// Source   transformers eager_attention_forward, sdpa_attention_forward.
[[nodiscard]] at::Tensor causal_attention(const at::Tensor& q_BNSD, const at::Tensor& k_BKSD,
                                          const at::Tensor& v_BKSD, AttentionImpl impl,
                                          SoftmaxDtype softmax = SoftmaxDtype::kWide,
                                          const AttentionDropout& dropout = {},
                                          const at::Tensor& query_positions = {});

/// Which of `length` tokens a token may not see: those after it.   Shapes   int64 [Q] -> bool [Q,
/// length].
[[nodiscard]] at::Tensor later_tokens(const at::Tensor& query_positions, std::int64_t length);

}  // namespace isoshard
