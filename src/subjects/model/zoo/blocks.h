// SPDX-License-Identifier: Apache-2.0
/// The blocks of decoder models, with their taps, on top of a strategy.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "subjects/model/model.h"
#include "subjects/model/ops/ops.h"

namespace isoshard {

/// One forward pass: what every block needs besides its input.
class ForwardPass {
 public:
  ForwardPass(const Parameters& parameters, const Strategy& strategy, Sink* sink,
              TrainingPass training = {})
      : parameters_(&parameters),
        strategy_(&strategy),
        sink_(sink),
        training_(std::move(training)) {}

  /// Errors   ShapeError that names a parameter which is missing.
  [[nodiscard]] const at::Tensor& parameter(std::string_view name) const;
  [[nodiscard]] const Strategy& strategy() const noexcept { return *strategy_; }
  [[nodiscard]] Sink* sink() const noexcept { return sink_; }
  [[nodiscard]] const ModelSection& section() const noexcept { return training_.section; }
  /// int64 [length], or [B,length] of packed documents: the positions of the tokens that forward
  /// gets. Undefined: 0 to length - 1.
  [[nodiscard]] at::Tensor positions(std::int64_t length) const {
    return training_.position_ids_BS.defined() ? training_.position_ids_BS
                                               : strategy_->token_positions(length);
  }
  /// The number of the section's last layer plus 1, of a model of `num_layers`.
  [[nodiscard]] std::int64_t end_layer(std::int64_t num_layers) const noexcept {
    return std::min(num_layers, training_.section.end_layer);
  }

  /// Taps x under `name`; `tp_dim` as for Strategy::activation_layout, tokens along `sequence_dim`.
  [[nodiscard]] at::Tensor tapped(std::string_view name, at::Tensor x, int tp_dim = -1,
                                  int sequence_dim = 1) const;
  /// `module`'s linear layer with its .weight and, if `has_bias`, .bias; tapped as `module`.
  [[nodiscard]] at::Tensor linear(const std::string& module, const at::Tensor& x,
                                  bool has_bias) const;
  /// The same with a weight of another name and no bias (a tied head).
  [[nodiscard]] at::Tensor linear(const std::string& module, const at::Tensor& x,
                                  std::string_view weight_name) const;
  /// x W + b with a weight [in, out], as transformers' Conv1D; not tapped (a fused output is tapped
  /// in its parts). The strategy's linear gets the transposed view: at::linear turns it back, so
  /// that the kernel sees addmm(b, x, W).
  [[nodiscard]] at::Tensor conv1d(const std::string& module, const at::Tensor& x) const;
  /// LayerNorm with `module`'s .weight and .bias; tapped as `module`.
  [[nodiscard]] at::Tensor layer_norm(const std::string& module, const at::Tensor& x,
                                      double eps) const;
  /// x with elements set to 0 at probability `rate` and the others divided by 1 - rate, as
  /// torch.nn.Dropout on CPU: times 0 or 1 / (1 - rate), which is rounded to x's dtype first.
  /// Nothing happens at rate 0 and in an evaluation. The mask is recorded as `site`.
  /// Errors   ShapeError unless x consists of boxes of the whole tensor.
  /// Source   aten/src/ATen/native/Dropout.cpp, _dropout_impl.
  [[nodiscard]] at::Tensor dropout(std::string_view site, const at::Tensor& x, double rate,
                                   int tp_dim = -1, int sequence_dim = 1) const;
  /// The function that causal_attention takes for the dropout of its weights [B,heads,S,S]; none if
  /// there is nothing to drop. `q_module` says whether heads are split.
  [[nodiscard]] AttentionDropout attention_dropout(std::string_view site, std::string_view q_module,
                                                   double rate) const;
  /// The forward pass of the layer with this number in the model: `layer` may be called again in
  /// backward (is_recomputed), with another pass and copies of `inputs`. What it captures must
  /// outlive backward.
  using Layer =
      std::function<at::Tensor(const ForwardPass& pass, std::span<const at::Tensor> inputs)>;
  [[nodiscard]] at::Tensor layer(std::int64_t number, std::vector<at::Tensor> inputs,
                                 Layer layer) const;
  /// The same pass, repeated in backward: what goes to `sink` has been there before.
  [[nodiscard]] ForwardPass repeated(Sink* sink) const;
  /// `dim` if `module`'s output is split over tp, -1 otherwise.
  [[nodiscard]] int tp_dim_of(std::string_view module, int dim) const {
    return strategy_->splits_output(module) ? dim : -1;
  }

 private:
  [[nodiscard]] at::Tensor keep_mask(std::string_view site, const at::Tensor& x, double rate,
                                     const Layout& layout) const;

  const Parameters* parameters_;
  const Strategy* strategy_;
  Sink* sink_;
  TrainingPass training_;
  bool is_repeated_ = false;
};

/// [B,S,heads*D] -> [B,S,heads,D]; the number of heads follows from the features that this rank
/// has.
/// Errors   ShapeError that names `module` if the features are not a whole number of heads.
[[nodiscard]] at::Tensor split_heads(std::string_view module, const at::Tensor& x,
                                     std::int64_t head_dim);

/// Errors   ShapeError if input_ids are not int64 [B,S], or their sequences longer than
///          max_positions.
void check_input_ids(const at::Tensor& input_ids, const ModelConfig& config,
                     const Strategy& strategy);
/// The positions of the tokens of `ids` [B,S]: [1,S], or [B,S] of packed documents.
[[nodiscard]] at::Tensor position_ids(const ForwardPass& pass, const at::Tensor& ids_BS);
/// The tables of the tokens that forward gets: `input` are their ids, or their stream in a section
/// without the embedding.
[[nodiscard]] RotaryTables rotary_tables_of(const ForwardPass& pass, const ModelConfig& config,
                                            const at::Tensor& input, at::ScalarType dtype);

/// Rotary self-attention with separate q, k and v projections. `module` is
/// "model.layers.0.self_attn".
[[nodiscard]] at::Tensor self_attention(const ForwardPass& pass, const ModelConfig& config,
                                        AttentionImpl impl, const std::string& module,
                                        const at::Tensor& x_BSH, const RotaryTables& tables);

/// down(silu(gate(x)) * up(x)). `module` is "model.layers.0.mlp".
[[nodiscard]] at::Tensor gated_mlp(const ForwardPass& pass, const std::string& module,
                                   const at::Tensor& x_BSH, bool has_bias);

/// A pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x)). `module` is
/// "model.layers.0".
[[nodiscard]] at::Tensor rotary_decoder_layer(const ForwardPass& pass, const ModelConfig& config,
                                              AttentionImpl impl, const std::string& module,
                                              const at::Tensor& x_BSH, const RotaryTables& tables);

/// Embedding, layers, final norm, head, or what of these the section has.   Shapes   int64 [B,S] ->
/// [B,S,V]; between sections [B,S,H].
/// Errors   ShapeError if input_ids are not int64 [B,S], or longer than max_positions.
[[nodiscard]] at::Tensor rotary_decoder(const ForwardPass& pass, const ModelConfig& config,
                                        AttentionImpl impl, const at::Tensor& input);

/// The parameters that ForwardPass::layer_norm reads, over `size` features.
void add_layer_norm(std::vector<ParameterSpec>& specs, const std::string& module,
                    std::int64_t size);

/// The parameters that rotary_decoder reads, in the order of transformers' named_parameters().
[[nodiscard]] std::vector<ParameterSpec> rotary_decoder_parameters(const ModelConfig& config);

/// The model made of the two.
[[nodiscard]] std::unique_ptr<Model> make_rotary_decoder(const ModelConfig& config,
                                                         AttentionImpl attention);

}  // namespace isoshard
