// SPDX-License-Identifier: Apache-2.0
// The ops of transformer models, op for op as Hugging Face transformers computes them.
#include "subjects/model/ops/ops.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "core/base/error.h"

namespace isoshard {
namespace {

double lowest(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::lowest();
    case at::kFloat:
      return std::numeric_limits<float>::lowest();
    case at::kBFloat16:
      return static_cast<double>(std::numeric_limits<at::BFloat16>::lowest());
    case at::kHalf:
      return static_cast<double>(std::numeric_limits<at::Half>::lowest());
    default:
      throw ShapeError(fmt::format("attention must be computed in a floating-point dtype, got {}",
                                   at::toString(dtype)));
  }
}

at::Tensor rotate_half(const at::Tensor& x) {
  const std::int64_t half = x.size(-1) / 2;
  return at::cat({x.slice(-1, half).neg(), x.slice(-1, 0, half)}, -1);
}

at::Tensor eager_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           double scaling, SoftmaxDtype softmax, const AttentionDropout& dropout,
                           const at::Tensor& query_positions) {
  const std::int64_t length = k.size(2);
  const at::TensorOptions options = q.options().requires_grad(false);
  const at::Tensor mask =
      query_positions.defined()
          ? at::zeros({q.size(2), length}, options)
                .masked_fill_(later_tokens(query_positions, length).to(q.device()),
                              lowest(q.scalar_type()))
          : at::full({length, length}, lowest(q.scalar_type()), options).triu(1);
  const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * scaling + mask;
  const at::ScalarType dtype = q.scalar_type();
  const at::Tensor weights = softmax == SoftmaxDtype::kModel
                                 ? at::softmax(scores, -1)
                                 : at::softmax(scores, -1, wide_type(dtype)).to(dtype);
  return at::matmul(dropout ? dropout(weights) : weights, v);
}

/// Frequencies [D/2] in fp32. A wave is long if it turns less than low_freq_factor times within the
/// original positions: it is slowed by `factor`. It is short if it turns more than high_freq_factor
/// times: it is kept. Between, the two are blended.
at::Tensor llama3_frequencies(const RopeConfig& rope, const at::Tensor& frequencies) {
  const double positions = static_cast<double>(rope.original_max_positions);
  const double longest_short_wave = positions / rope.high_freq_factor,
               shortest_long_wave = positions / rope.low_freq_factor;
  // as Python's scalar / tensor
  const at::Tensor wavelengths = frequencies.reciprocal() * (2 * std::numbers::pi);
  const at::Tensor slowed =
      at::where(wavelengths > shortest_long_wave, frequencies / rope.factor, frequencies);
  const at::Tensor smooth = ((wavelengths.reciprocal() * positions) - rope.low_freq_factor) /
                            (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor blended = (1 - smooth) * slowed / rope.factor + smooth * slowed;
  const at::Tensor is_between =
      wavelengths.ge(longest_short_wave) * wavelengths.le(shortest_long_wave);
  return at::where(is_between, blended, slowed);
}

}  // namespace

at::ScalarType wide_type(at::ScalarType dtype) noexcept {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = x.to(wide_type(x.scalar_type()));
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + eps)).to(x.scalar_type());
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps) {
  return at::layer_norm(x, {x.size(-1)}, weight, bias, eps);
}

at::Tensor gelu_new(const at::Tensor& x) {
  // One statement each: the order in which C++ evaluates operands is not fixed, and the order of
  // these ops is the order in which backward adds up the three parts of x's gradient.
  const at::Tensor half = 0.5 * x;
  const at::Tensor cubic = 0.044715 * at::pow(x, 3.0);
  const at::Tensor inner = std::sqrt(2.0 / std::numbers::pi) * (x + cubic);
  return half * (1.0 + at::tanh(inner));
}

RotaryTables rotary_tables(const RopeConfig& rope, std::int64_t head_dim, std::int64_t length,
                           at::ScalarType dtype, const at::Tensor& positions) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions fp32 = at::TensorOptions(at::kFloat);
  const at::Tensor exponents =
      at::arange(0, head_dim, 2, at::kLong).to(at::kFloat) / static_cast<double>(head_dim);
  at::Tensor frequencies = at::pow(rope.theta, exponents).reciprocal();
  if (rope.type == "llama3") frequencies = llama3_frequencies(rope, frequencies);
  frequencies = frequencies.to(wide_type(dtype));
  const at::Tensor places = at::arange(length, fp32).to(wide_type(dtype));
  const at::Tensor half_angles = places.unsqueeze(1) * frequencies.unsqueeze(0);
  const at::Tensor angles = at::cat({half_angles, half_angles}, -1);
  const RotaryTables tables{angles.cos().to(dtype), angles.sin().to(dtype)};
  if (!positions.defined()) return tables;
  const auto rows_of = [&](const at::Tensor& table) {
    const at::Tensor rows = at::embedding(table, positions);
    return positions.dim() == 1 ? rows : rows.unsqueeze(1);
  };
  return {rows_of(tables.cos_SD), rows_of(tables.sin_SD)};
}

at::Tensor apply_rotary(const at::Tensor& x_BNSD, const RotaryTables& tables) {
  return x_BNSD * tables.cos_SD + rotate_half(x_BNSD) * tables.sin_SD;
}

at::Tensor repeat_kv(const at::Tensor& x_BKSD, std::int64_t groups) {
  if (groups == 1) return x_BKSD;
  const std::int64_t batch = x_BKSD.size(0), heads = x_BKSD.size(1), length = x_BKSD.size(2),
                     dim = x_BKSD.size(3);
  return x_BKSD.unsqueeze(2)
      .expand({batch, heads, groups, length, dim})
      .reshape({batch, heads * groups, length, dim});
}

at::Tensor later_tokens(const at::Tensor& query_positions, std::int64_t length) {
  return at::arange(length, query_positions.options())
      .unsqueeze(0)
      .gt(query_positions.unsqueeze(1));
}

at::Tensor causal_attention(const at::Tensor& q_BNSD, const at::Tensor& k_BKSD,
                            const at::Tensor& v_BKSD, AttentionImpl impl, SoftmaxDtype softmax,
                            const AttentionDropout& dropout, const at::Tensor& query_positions) {
  if (impl == AttentionImpl::kSdpa && dropout) {
    throw UsageError(
        "attention dropout is not available with sdpa, whose kernel draws a mask that nothing else "
        "can reproduce; use eager attention");
  }
  const std::int64_t heads = q_BNSD.size(1), kv_heads = k_BKSD.size(1);
  if (kv_heads == 0 || heads % kv_heads != 0) {
    throw ShapeError(fmt::format(
        "the number of query heads must be divisible by the {} kv heads, got {}", kv_heads, heads));
  }
  const at::Tensor k = repeat_kv(k_BKSD, heads / kv_heads), v = repeat_kv(v_BKSD, heads / kv_heads);
  const double scaling = std::pow(static_cast<double>(q_BNSD.size(3)), -0.5);
  at::Tensor out_BNSD;
  if (impl == AttentionImpl::kEager) {
    out_BNSD = eager_attention(q_BNSD, k, v, scaling, softmax, dropout, query_positions);
  } else if (query_positions.defined()) {
    out_BNSD = at::scaled_dot_product_attention(
        q_BNSD, k, v, later_tokens(query_positions, k.size(2)).logical_not().to(q_BNSD.device()),
        0.0,
        /*is_causal=*/false, scaling);
  } else {
    out_BNSD = at::scaled_dot_product_attention(q_BNSD, k, v, {}, 0.0, /*is_causal=*/true, scaling);
  }
  return out_BNSD.transpose(1, 2).contiguous().flatten(2);
}

}  // namespace isoshard
