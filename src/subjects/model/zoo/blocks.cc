// SPDX-License-Identifier: Apache-2.0
// The blocks of decoder models, with their taps.
#include "subjects/model/zoo/blocks.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"
#include "subjects/model/zoo/recompute.h"

namespace isoshard {

at::Tensor split_heads(std::string_view module, const at::Tensor& x, std::int64_t head_dim) {
  if (x.size(-1) % head_dim != 0) {
    throw ShapeError(
        fmt::format("the features of {} must be a multiple of the head size {}, got {}; a shard "
                    "must not cut a head",
                    module, head_dim, x.size(-1)));
  }
  return x.unflatten(-1, {x.size(-1) / head_dim, head_dim});
}

void check_input_ids(const at::Tensor& ids, const ModelConfig& config, const Strategy& strategy) {
  if (ids.dim() != 2 || ids.scalar_type() != at::kLong) {
    throw ShapeError(fmt::format("input_ids must be int64 [batch, sequence], got {} [{}]",
                                 at::toString(ids.scalar_type()), fmt::join(ids.sizes(), ", ")));
  }
  const std::int64_t length = strategy.sequence_length(ids.size(1));
  if (length > config.max_positions) {
    throw ShapeError(
        fmt::format("the sequence length must be at most the {} positions of the model, got {}",
                    config.max_positions, length));
  }
}

at::Tensor position_ids(const ForwardPass& pass, const at::Tensor& ids_BS) {
  const at::Tensor positions = pass.positions(ids_BS.size(1));
  if (!positions.defined()) return at::arange(ids_BS.size(1), ids_BS.options()).unsqueeze(0);
  return (positions.dim() == 1 ? positions.unsqueeze(0) : positions).to(ids_BS.device());
}

RotaryTables rotary_tables_of(const ForwardPass& pass, const ModelConfig& config,
                              const at::Tensor& input, at::ScalarType dtype) {
  const Strategy& strategy = pass.strategy();
  const std::int64_t length =
      pass.section().has_embedding ? input.size(1) : strategy.tokens_of_stream(input.size(1));
  // in host memory, so that every device has the same angles
  const RotaryTables tables =
      rotary_tables(config.rope, config.head_dim, strategy.sequence_length(length), dtype,
                    pass.positions(length));
  return {tables.cos_SD.to(input.device()), tables.sin_SD.to(input.device())};
}

const at::Tensor& ForwardPass::parameter(std::string_view name) const {
  const auto found = parameters_->find(name);
  if (found == parameters_->end() || !found->second.defined()) {
    throw ShapeError(
        fmt::format("parameter {} is missing among the {} given", name, parameters_->size()));
  }
  return found->second;
}

at::Tensor ForwardPass::tapped(std::string_view name, at::Tensor x, int tp_dim,
                               int sequence_dim) const {
  if (sink_ == nullptr) return x;
  // before the move below
  ActivationLayouts layouts = strategy_->activation_layouts(name, x, tp_dim);
  layouts.value = strategy_->over_context(std::move(layouts.value), x, sequence_dim);
  layouts.gradient = strategy_->over_context(std::move(layouts.gradient), x, sequence_dim);
  return detail::tap_with_sink(*sink_, name, std::move(x), strategy_->activation_grad_scale(),
                               std::move(layouts.value), std::move(layouts.gradient));
}

at::Tensor ForwardPass::linear(const std::string& module, const at::Tensor& x,
                               bool has_bias) const {
  std::optional<at::Tensor> bias;
  if (has_bias) bias = parameter(module + ".bias");
  return tapped(module, strategy_->linear(module, x, parameter(module + ".weight"), bias, sink_),
                tp_dim_of(module, 2));
}

at::Tensor ForwardPass::linear(const std::string& module, const at::Tensor& x,
                               std::string_view weight_name) const {
  return tapped(module, strategy_->linear(module, x, parameter(weight_name), std::nullopt, sink_),
                tp_dim_of(module, 2));
}

at::Tensor ForwardPass::layer_norm(const std::string& module, const at::Tensor& x,
                                   double eps) const {
  return tapped(module, isoshard::layer_norm(x, parameter(module + ".weight"),
                                             parameter(module + ".bias"), eps));
}

at::Tensor ForwardPass::conv1d(const std::string& module, const at::Tensor& x) const {
  return strategy_->linear(module, x, parameter(module + ".weight").t(),
                           parameter(module + ".bias"), sink_);
}

at::Tensor ForwardPass::dropout(std::string_view site, const at::Tensor& x, double rate, int tp_dim,
                                int sequence_dim) const {
  if (rate == 0 || training_.streams == nullptr) return x;
  const Layout layout = strategy_->over_context(
      strategy_->activation_layouts(site, x, tp_dim).value, x, sequence_dim);
  const at::Tensor keep = keep_mask(site, x, rate, layout);
  if (sink_ != nullptr)
    sink_->on_record({RecordKind::kMask, std::string(site), layout, 1.0, is_repeated_}, keep);
  return x * keep.to(x.scalar_type()).div_(1 - rate);
}

at::Tensor ForwardPass::keep_mask(std::string_view site, const at::Tensor& x, double rate,
                                  const Layout& layout) const {
  at::Tensor keep;
  std::int64_t covered = 0;
  for (const Box& box : boxes_of(layout, training_.mesh, training_.rank)) {
    MaskPart part{site,     training_.step, rate, layout.global_shape, box.global_offset,
                  box.size, is_repeated_};
    part.offset.front() += training_.first_sample;
    const at::Tensor own = training_.streams->keep_mask(part).to(x.device());
    if (box.size == x.sizes().vec()) return own;
    if (!keep.defined()) keep = at::empty(x.sizes(), own.options());
    at::Tensor place = keep;
    for (std::size_t d = 0; d < box.size.size(); ++d)
      place = place.narrow(static_cast<std::int64_t>(d), box.local_offset[d], box.size[d]);
    place.copy_(own);
    covered += own.numel();
  }
  if (!keep.defined() || covered != x.numel()) {
    throw ShapeError(fmt::format("dropout {}: the rank's [{}] must be boxes of the whole tensor",
                                 site, fmt::join(x.sizes(), ", ")));
  }
  return keep;
}

AttentionDropout ForwardPass::attention_dropout(std::string_view site, std::string_view q_module,
                                                double rate) const {
  if (rate == 0 || training_.streams == nullptr) return {};
  return [this, site = std::string(site), rate,
          tp_dim = tp_dim_of(q_module, 1)](const at::Tensor& weights_BNSS) {
    return dropout(site, weights_BNSS, rate, tp_dim, /*sequence_dim=*/2);
  };
}

ForwardPass ForwardPass::repeated(Sink* sink) const {
  ForwardPass pass = *this;
  pass.sink_ = sink;
  pass.is_repeated_ = true;
  return pass;
}

at::Tensor ForwardPass::layer(std::int64_t number, std::vector<at::Tensor> inputs,
                              Layer layer) const {
  return is_recomputed(number, training_.recompute_every)
             ? recomputed(*this, std::move(inputs), std::move(layer))
             : layer(*this, inputs);
}

at::Tensor self_attention(const ForwardPass& pass, const ModelConfig& config, AttentionImpl impl,
                          const std::string& module, const at::Tensor& x_BSH,
                          const RotaryTables& tables) {
  const std::string q_name = module + ".q_proj", k_name = module + ".k_proj",
                    v_name = module + ".v_proj";
  const auto heads = [&](const std::string& projection, const std::string& norm) {  // [B,heads,S,D]
    at::Tensor x_BSND =
        split_heads(projection, pass.linear(projection, x_BSH, config.qkv_bias), config.head_dim);
    if (!norm.empty() && config.qk_norm) {
      x_BSND =
          pass.tapped(norm, rms_norm(x_BSND, pass.parameter(norm + ".weight"), config.norm_eps),
                      pass.tp_dim_of(projection, 2));
    }
    return x_BSND.transpose(1, 2);
  };
  at::Tensor q_BNSD = heads(q_name, module + ".q_norm"), k_BKSD = heads(k_name, module + ".k_norm");
  const at::Tensor v_BKSD = heads(v_name, "");
  q_BNSD = pass.tapped(module + ".q_rope", apply_rotary(q_BNSD, tables), pass.tp_dim_of(q_name, 1),
                       /*sequence_dim=*/2);
  k_BKSD = pass.tapped(module + ".k_rope", apply_rotary(k_BKSD, tables), pass.tp_dim_of(k_name, 1),
                       /*sequence_dim=*/2);
  const AttentionDropout dropout =
      pass.attention_dropout(module + ".attention_dropout", q_name, config.attention_dropout);
  const at::Tensor core_BSN = pass.tapped(
      module + ".core",
      pass.strategy().attention(module, q_BNSD, k_BKSD, v_BKSD, impl, SoftmaxDtype::kWide, dropout),
      pass.tp_dim_of(q_name, 2));
  const std::string o_name = module + ".o_proj";
  return pass.tapped(module, pass.linear(o_name, core_BSN, config.attention_out_bias),
                     pass.tp_dim_of(o_name, 2));
}

at::Tensor gated_mlp(const ForwardPass& pass, const std::string& module, const at::Tensor& x_BSH,
                     bool has_bias) {
  const std::string gate_name = module + ".gate_proj", up_name = module + ".up_proj",
                    down_name = module + ".down_proj";
  const at::Tensor gate = pass.linear(gate_name, x_BSH, has_bias);
  const at::Tensor up = pass.linear(up_name, x_BSH, has_bias);
  const at::Tensor act =
      pass.tapped(module + ".act", at::silu(gate) * up, pass.tp_dim_of(gate_name, 2));
  return pass.tapped(module, pass.linear(down_name, act, has_bias), pass.tp_dim_of(down_name, 2));
}

at::Tensor rotary_decoder_layer(const ForwardPass& pass, const ModelConfig& config,
                                AttentionImpl impl, const std::string& module,
                                const at::Tensor& x_BSH, const RotaryTables& tables) {
  pass.strategy().enter_block(module);
  const auto norm = [&](const std::string& name, const at::Tensor& x) {
    return pass.tapped(name, rms_norm(x, pass.parameter(name + ".weight"), config.norm_eps));
  };
  const at::Tensor attention_in = norm(module + ".input_layernorm", x_BSH);
  const at::Tensor middle =
      x_BSH + self_attention(pass, config, impl, module + ".self_attn", attention_in, tables);
  const at::Tensor mlp_in = norm(module + ".post_attention_layernorm", middle);
  return pass.strategy().leave_block(
      module,
      pass.tapped(module, middle + gated_mlp(pass, module + ".mlp", mlp_in, config.mlp_bias)));
}

at::Tensor rotary_decoder(const ForwardPass& pass, const ModelConfig& config, AttentionImpl impl,
                          const at::Tensor& input) {
  constexpr std::string_view kEmbedding = "model.embed_tokens",
                             kEmbeddingWeight = "model.embed_tokens.weight";
  at::Tensor x_BSH = input;
  if (pass.section().has_embedding) {
    check_input_ids(input, config, pass.strategy());
    x_BSH =
        pass.strategy().embedding(kEmbedding, input, pass.parameter(kEmbeddingWeight), pass.sink());
    x_BSH = pass.tapped(kEmbedding, std::move(x_BSH), pass.tp_dim_of(kEmbedding, 2));
  }
  const RotaryTables tables = rotary_tables_of(pass, config, input, x_BSH.scalar_type());
  for (std::int64_t layer = pass.section().first_layer; layer < pass.end_layer(config.num_layers);
       ++layer) {
    x_BSH = pass.layer(
        layer, {x_BSH},
        [&config, impl, layer, tables](const ForwardPass& own, std::span<const at::Tensor> inputs) {
          return rotary_decoder_layer(own, config, impl, fmt::format("model.layers.{}", layer),
                                      inputs[0], tables);
        });
  }
  if (!pass.section().has_head) return x_BSH;
  x_BSH = pass.tapped("model.norm",
                      rms_norm(x_BSH, pass.parameter("model.norm.weight"), config.norm_eps));
  return pass.linear("lm_head", x_BSH,
                     config.tie_word_embeddings ? kEmbeddingWeight : "lm_head.weight");
}

}  // namespace isoshard
