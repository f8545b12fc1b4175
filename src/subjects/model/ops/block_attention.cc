// SPDX-License-Identifier: Apache-2.0
// Scores of a block, with the query heads of a kv head one after the other in one product.
#include "subjects/model/ops/block_attention.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "core/base/error.h"
#include "subjects/model/ops/ops.h"

namespace isoshard {
namespace {

// Products of wide tensors stay wide.
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

constexpr double kNever = -std::numeric_limits<double>::infinity();

// [B,N,Q,D] -> [B,K,G*Q,D] in the wide dtype
at::Tensor grouped(const at::Tensor& x_BNQD, std::int64_t kv_heads) {
  if (kv_heads == 0 || x_BNQD.size(1) % kv_heads != 0) {
    throw ShapeError(
        fmt::format("the number of query heads must be divisible by the {} kv heads, "
                    "got {}",
                    kv_heads, x_BNQD.size(1)));
  }
  return x_BNQD.to(wide_type(x_BNQD.scalar_type())).unflatten(1, {kv_heads, -1}).flatten(2, 3);
}

at::Tensor ungrouped(const at::Tensor& x, std::int64_t queries) {
  return x.unflatten(2, {-1, queries}).flatten(1, 2);
}

double scaling_of(const at::Tensor& q) {
  return std::pow(static_cast<double>(q.size(3)), -0.5);
}

at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k_wide, const BlockPlaces& places) {
  const at::Tensor hidden_QT =
      places.keys_T.unsqueeze(0).gt(places.queries_Q.unsqueeze(1)).to(q.device());
  const std::int64_t groups = q.size(1) / k_wide.size(1);
  return (at::matmul(grouped(q, k_wide.size(1)), k_wide.transpose(2, 3)) * scaling_of(q))
      .masked_fill(hidden_QT.repeat({groups, 1}), kNever);
}

}  // namespace

BlockAttention block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const BlockPlaces& places) {
  const NoAutocast no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType wide = wide_type(q.scalar_type());
  const at::Tensor scores = scores_of(q, k.to(wide), places);
  const at::Tensor largest = scores.amax(-1, /*keepdim=*/true);
  const at::Tensor shift = largest.masked_fill(largest.eq(kNever), 0);
  const at::Tensor exponentials = (scores - shift).exp();
  const at::Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
  const at::Tensor out = at::matmul(exponentials, v.to(wide)) / sum.masked_fill(sum.eq(0), 1);
  return {ungrouped(out, q.size(2)).to(q.scalar_type()), ungrouped(sum.log() + shift, q.size(2))};
}

void merge_block(at::Tensor& out_BNQD, at::Tensor& lse_BNQ1, const BlockAttention& block) {
  const at::Tensor block_out = block.out_BNQD.to(out_BNQD.scalar_type());
  const at::Tensor share = at::sigmoid(block.lse_BNQ1 - lse_BNQ1).to(out_BNQD.scalar_type());
  out_BNQD = out_BNQD - share * (out_BNQD - block_out);
  lse_BNQ1 = lse_BNQ1 - at::log_sigmoid(lse_BNQ1 - block.lse_BNQ1);
}

BlockGradients block_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const BlockPlaces& places, const at::Tensor& out,
                               const at::Tensor& lse, const at::Tensor& gradient) {
  const at::ScalarType wide = wide_type(q.scalar_type());
  const std::int64_t kv_heads = k.size(1);
  const at::Tensor k_wide = k.to(wide), v_wide = v.to(wide);
  const at::Tensor q_wide = grouped(q, kv_heads), gradient_wide = grouped(gradient, kv_heads);
  const at::Tensor weights = (scores_of(q, k_wide, places) - grouped(lse, kv_heads)).exp();
  const at::Tensor delta = (gradient_wide * grouped(out, kv_heads)).sum(-1, /*keepdim=*/true);
  const at::Tensor of_scores =
      weights * (at::matmul(gradient_wide, v_wide.transpose(2, 3)) - delta) * scaling_of(q);
  return {ungrouped(at::matmul(of_scores, k_wide), q.size(2)),
          at::matmul(of_scores.transpose(2, 3), q_wide),
          at::matmul(weights.transpose(2, 3), gradient_wide)};
}

bool sees_any(const BlockPlaces& places) {
  return places.keys_T.min().item<std::int64_t>() <= places.queries_Q.max().item<std::int64_t>();
}

}  // namespace isoshard
