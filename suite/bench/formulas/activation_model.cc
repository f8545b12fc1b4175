// SPDX-License-Identifier: Apache-2.0
// The tensors that autograd saves of each module, counted from src/subjects/model/zoo and ops.
#include "suite/bench/formulas/activation_model.h"

#include <algorithm>
#include <cmath>

#include "fixtures/cases/setting.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

/// Sizes of one rank, in elements.
struct Sizes {
  double tokens = 0;         ///< T: batch x sequence, of this rank's part over cp
  double stream_tokens = 0;  ///< of what is split along the sequence over tp, too
  double sequence = 0, batch = 0;
  double h = 0, q = 0, kv = 0, f = 0, v = 0, heads = 0, head_dim = 0;
  double e = 0;       ///< bytes of an element of products
  double stream = 0;  ///< of the stream between layers
  double wide = 4;    ///< of norms
};

double real(std::int64_t size) {
  return static_cast<double>(size);
}

Sizes sizes_of(const Case& c) {
  const ModelConfig& m = c.config;
  const double tp = c.degrees.tp;
  Sizes s;
  s.batch = real(c.batch_size) * (is_reference(c.subject) ? c.degrees.dp : 1);
  s.sequence = real(c.seq_length);
  s.tokens = s.batch * s.sequence / c.degrees.cp;
  s.stream_tokens = c.settings.sequence_parallel ? s.tokens / tp : s.tokens;
  s.h = real(m.hidden_size);
  s.heads = real(m.num_heads) / tp;
  s.head_dim = real(m.head_dim);
  s.q = s.heads * s.head_dim;
  s.kv = std::max(1.0, real(m.num_kv_heads) / tp) * s.head_dim;
  s.f = real(m.intermediate_size) / tp;
  s.v = splits_vocabulary(c) ? std::ceil(real(m.vocab_size) / tp) : real(m.vocab_size);
  s.stream = static_cast<double>(size_of(c.dtype));
  s.e = static_cast<double>(size_of(c.settings.autocast.value_or(c.dtype)));
  s.wide = std::max(4.0, s.stream);
  return s;
}

/// x in the wide dtype (which is x itself where that is its dtype), the normed x, and the result
/// that a product reads.
double norm_bytes(const Sizes& s, bool is_autocast) {
  const double result = is_autocast ? 0 : s.stream;
  return s.stream_tokens * s.h * (s.wide + s.stream + result);
}

double attention_scores(const Case& c, const Sizes& s) {
  if (c.attention == AttentionImpl::kSdpa) return s.tokens * s.heads * 4;  // sums of exponentials
  const double scores = s.batch * s.heads * s.sequence * s.sequence / c.degrees.cp;
  return scores * (s.wide > s.e ? s.wide + s.e : s.e);
}

/// Of a rotary decoder's layer.
double rotary_layer_bytes(const Case& c, const Sizes& s) {
  const bool is_autocast = c.settings.autocast.has_value();
  double bytes = 2 * norm_bytes(s, is_autocast);
  // what products read, where it is a copy: each of q, k, v, gate and up its own under autocast,
  // one for attention and one for the mlp where it is gathered along the sequence
  if (is_autocast) bytes += 5 * s.tokens * s.h * s.e;
  if (!is_autocast && c.settings.sequence_parallel && c.degrees.tp > 1) {
    bytes -= 2 * s.stream_tokens * s.h * s.stream;
    bytes += 2 * s.tokens * s.h * s.e;
  }
  if (c.config.qk_norm) bytes += s.tokens * (s.q + s.kv) * (s.wide + s.e);
  bytes += s.tokens * 4 * s.q * s.e;  // q, k and v for all heads, and the result
  bytes += attention_scores(c, s);
  bytes += s.tokens * 4 * s.f * s.e;  // gate, its silu, up, their product
  return bytes;
}

/// Of GPT-2's and Megatron-Core's GPT layer: layer norms keep their input, gelu_new its parts.
double gpt_layer_bytes(const Case& c, const Sizes& s) {
  double bytes = 2 * 2 * s.stream_tokens * s.h * s.stream;
  bytes += s.tokens * 4 * s.q * s.e + attention_scores(c, s);
  bytes += s.tokens * 5 * s.f * s.e;
  return bytes;
}

double layer_bytes(const Case& c, const Sizes& s) {
  const bool is_gpt = c.config.model_type == "gpt2" || c.config.model_type == "megatron_gpt";
  return is_gpt ? gpt_layer_bytes(c, s) : rotary_layer_bytes(c, s);
}

double num_layers_of(const Case& c, const std::vector<ModelSection>& sections) {
  if (sections.empty()) return real(c.config.num_layers);
  double layers = 0;
  for (const ModelSection& section : sections)
    layers += real(std::min(section.end_layer, c.config.num_layers) - section.first_layer);
  return layers / static_cast<double>(sections.size());
}

}  // namespace

ActivationBytes activation_bytes(const Case& c, const std::vector<ModelSection>& sections,
                                 int in_flight) {
  const Sizes s = sizes_of(c);
  const bool has_head = sections.empty() || std::ranges::any_of(sections, &ModelSection::has_head);
  const double layer = layer_bytes(c, s), stream = s.stream_tokens * s.h * s.stream;
  const double layers = num_layers_of(c, sections);
  const int every = c.settings.recompute_every;
  const double recomputed = every == 0 ? 0 : std::floor(layers / every);
  ActivationBytes bytes;
  bytes.kept = in_flight * ((layers - recomputed) * layer + recomputed * stream);
  bytes.layer_backward = (recomputed > 0 ? layer : 0) + s.tokens * 2 * s.f * s.e + stream;
  bytes.last_layer = stream;
  if (!has_head) return bytes;
  const double norm = norm_bytes(s, c.settings.autocast.has_value());
  bytes.kept += norm + stream;
  bytes.logits = s.tokens * s.v * s.e;
  // log-softmax, its gradient and the result, of a block of rows (ops/loss_rows.cc)
  constexpr double kBlockElements = 1 << 18, kBlockTensors = 3;
  const double rows = std::clamp(std::floor(kBlockElements / s.v), 1.0, s.tokens);
  bytes.loss_blocks = kBlockTensors * rows * s.v * s.wide;
  const double weight = s.v * s.h * s.stream;
  bytes.head_weight_gradient = weight;
  const bool has_embedding =
      sections.empty() || std::ranges::any_of(sections, &ModelSection::has_embedding);
  if (c.config.tie_word_embeddings && has_embedding) bytes.tied_gradients = 2 * weight;
  bytes.head_gradients = weight + s.tokens * s.h * s.e;
  if (c.settings.autocast.has_value()) bytes.kept += s.v * s.h * s.e;
  return bytes;
}

}  // namespace isoshard
