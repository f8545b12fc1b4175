// SPDX-License-Identifier: Apache-2.0
/// The seam between a model, which is written once, and the way it is spread over ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "core/mesh/layout.h"
#include "core/observe/sink.h"
#include "subjects/model/ops/loss.h"
#include "subjects/model/ops/ops.h"

namespace isoshard {

/// Where an activation and its gradient lie. They differ where ranks hold copies of a value that
/// each of them uses for a part.
struct ActivationLayouts {
  Layout value, gradient;
};

/// Keys and values [B,K,S,D].
struct KeysValues {
  at::Tensor k, v;
};

/// How a parallel strategy computes the parts of a model that it may split. Model code calls these
/// instead of apply_linear and at::embedding, and reads head counts off the shapes it gets back.
///
/// The class itself is the unsharded strategy: plain ops, activations that hold this dp rank's
/// samples.
/// Guarantees   the base class's ops are exactly apply_linear and at::embedding.
class Strategy {
 public:
  /// `dp_degree`: the batch dim (0) of activations is split over this many dp ranks.
  /// `activation_grad_scale`: factor on recorded activation gradients (dp_degree when gradients are
  /// averaged over dp).
  explicit Strategy(int dp_degree = 1, double activation_grad_scale = 1.0)
      : dp_degree_(dp_degree), activation_grad_scale_(activation_grad_scale) {}
  virtual ~Strategy() = default;

  /// y = x W^T + b.   Shapes   x [..., in], weight as this rank holds it, y [..., out or out / tp].
  [[nodiscard]] virtual at::Tensor linear(std::string_view module, const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, Sink* sink) const;
  [[nodiscard]] virtual at::Tensor embedding(std::string_view module, const at::Tensor& ids_BS,
                                             const at::Tensor& weight, Sink* sink) const;
  /// The loss of logits as this strategy's head gives them.   See isoshard::cross_entropy.
  [[nodiscard]] virtual CrossEntropy loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                                          const at::Tensor& weight_B, double label_smoothing) const;
  /// True if this module's output holds only this tp rank's part of the last dim.
  [[nodiscard]] virtual bool splits_output(std::string_view module) const;
  /// The degree of tp, 1 if there is none.
  [[nodiscard]] virtual int tp_degree() const noexcept { return 1; }

  /// Causal softmax attention of this rank's queries. `module` names it, as
  /// "model.layers.0.self_attn". See isoshard::causal_attention.
  [[nodiscard]] virtual at::Tensor attention(std::string_view module, const at::Tensor& q_BNSD,
                                             const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                                             AttentionImpl impl, SoftmaxDtype softmax,
                                             const AttentionDropout& dropout) const;
  /// The keys and values of all tokens, in the order of the tokens, from those of this rank's.
  [[nodiscard]] virtual KeysValues whole_context(std::string_view module, const at::Tensor& k_BKSD,
                                                 const at::Tensor& v_BKSD) const;
  /// The places in their sequence of the `length` tokens that forward gets: int64 [length].
  /// Undefined: 0 to length - 1, which are all.
  [[nodiscard]] virtual at::Tensor token_positions(std::int64_t length) const;
  /// How long the sequence is of which forward gets `length` tokens.
  [[nodiscard]] virtual std::int64_t sequence_length(std::int64_t length) const { return length; }

  /// How many tokens forward gets of which its layers hold `length` between regions.
  [[nodiscard]] virtual std::int64_t tokens_of_stream(std::int64_t length) const { return length; }

  /// Around each decoder layer, also where backward computes it again: parameters below `module`
  /// are read between the two only.
  virtual void enter_block(std::string_view module) const;
  /// Returns the layer's output to go on with.
  [[nodiscard]] virtual at::Tensor leave_block(std::string_view module, at::Tensor output) const;

  /// The layout of an activation: dim 0 is split over dp (if dp_degree > 1), `tp_dim` over tp (-1:
  /// replicated over tp).
  [[nodiscard]] Layout activation_layout(const at::Tensor& local, int tp_dim) const;
  /// The layouts of the activation at a named point and of its gradient: activation_layout for
  /// both, unless the strategy overrides it for some points.
  [[nodiscard]] virtual ActivationLayouts activation_layouts(std::string_view point,
                                                             const at::Tensor& local,
                                                             int tp_dim) const;
  /// The layout of an activation whose dim `sequence_dim` holds the tokens that forward gets, from
  /// that of activation_layouts, which does not know the dim.
  [[nodiscard]] virtual Layout over_context(Layout layout, const at::Tensor& local,
                                            int sequence_dim) const;
  [[nodiscard]] double activation_grad_scale() const noexcept { return activation_grad_scale_; }
  [[nodiscard]] int dp_degree() const noexcept { return dp_degree_; }

 private:
  int dp_degree_;
  double activation_grad_scale_;
};

}  // namespace isoshard
