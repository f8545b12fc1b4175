// SPDX-License-Identifier: Apache-2.0
// The unsharded strategy, and layouts of activations for all strategies.
#include "subjects/model/strategy.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "core/base/error.h"
#include "subjects/model/ops/linear.h"

namespace isoshard {

at::Tensor Strategy::linear(std::string_view /*module*/, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            Sink* /*sink*/) const {
  return apply_linear(x, weight, bias);
}

at::Tensor Strategy::embedding(std::string_view /*module*/, const at::Tensor& ids_BS,
                               const at::Tensor& weight, Sink* /*sink*/) const {
  return at::embedding(weight, ids_BS);
}

CrossEntropy Strategy::loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                            const at::Tensor& weight_B, double label_smoothing) const {
  LossOptions options;
  options.label_smoothing = label_smoothing;
  return cross_entropy(logits, targets_BS, weight_B, options);
}

at::Tensor Strategy::attention(std::string_view /*module*/, const at::Tensor& q_BNSD,
                               const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                               AttentionImpl impl, SoftmaxDtype softmax,
                               const AttentionDropout& dropout) const {
  return causal_attention(q_BNSD, k_BKSD, v_BKSD, impl, softmax, dropout);
}

KeysValues Strategy::whole_context(std::string_view /*module*/, const at::Tensor& k_BKSD,
                                   const at::Tensor& v_BKSD) const {
  return {k_BKSD, v_BKSD};
}

at::Tensor Strategy::token_positions(std::int64_t /*length*/) const {
  return {};
}

Layout Strategy::over_context(Layout layout, const at::Tensor& /*local*/,
                              int /*sequence_dim*/) const {
  return layout;
}

bool Strategy::splits_output(std::string_view /*module*/) const {
  return false;
}

void Strategy::enter_block(std::string_view /*module*/) const {}

at::Tensor Strategy::leave_block(std::string_view /*module*/, at::Tensor output) const {
  return output;
}

Layout Strategy::activation_layout(const at::Tensor& local, int tp_dim) const {
  Layout layout;
  layout.global_shape = local.sizes().vec();
  const auto split = [&](Axis axis, int dim, int degree) {
    if (degree == 1) return;
    if (dim >= local.dim())
      throw MeshError(fmt::format(
          "the dim to split must be below the {} dims of the tensor, got {}", local.dim(), dim));
    layout.global_shape[static_cast<std::size_t>(dim)] *= degree;
    layout.placements.push_back(shard(axis, dim));
  };
  split(Axis::kDp, 0, dp_degree_);
  if (tp_dim >= 0) split(Axis::kTp, tp_dim, tp_degree());
  return layout;
}

ActivationLayouts Strategy::activation_layouts(std::string_view /*point*/, const at::Tensor& local,
                                               int tp_dim) const {
  const Layout layout = activation_layout(local, tp_dim);
  return {layout, layout};
}

}  // namespace isoshard
