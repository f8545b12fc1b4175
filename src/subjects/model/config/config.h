// SPDX-License-Identifier: Apache-2.0
/// A transformer's configuration as config.json gives it, in one struct for every architecture.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace isoshard {

enum class AttentionImpl : std::uint8_t { kEager, kSdpa };
[[nodiscard]] std::string_view name_of(AttentionImpl impl) noexcept;
/// eager, sdpa. Errors   UsageError; flash_attention_2 is refused by name (no CPU kernel).
[[nodiscard]] AttentionImpl parse_attention_impl(std::string_view name);

struct RopeConfig {
  std::string type = "default";  ///< default or llama3
  double theta = 10000.0;
  // llama3 only: long waves are slowed by `factor`, short ones kept, those between blended.
  double factor = 1.0, low_freq_factor = 1.0, high_freq_factor = 1.0;
  std::int64_t original_max_positions = 0;
  friend bool operator==(const RopeConfig&, const RopeConfig&) = default;
};

struct ModelConfig {
  std::string model_type;  ///< "qwen2"
  std::int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0;
  std::int64_t num_layers = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  std::int64_t max_positions = 0;
  double norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool attention_out_bias = false;  ///< o_proj
  bool mlp_bias = false;
  bool qk_norm = false;            ///< RMS norms over each head of q and k, before the rotation
  bool learned_positions = false;  ///< megatron_gpt: a table of positions instead of rotation
  std::int64_t row_nonzeros = 0;   ///< lattice: non-zero entries in a row of a weight
  /// Probabilities of dropout in training, in [0, 1): of the embedding's sum, of attention weights,
  /// of what a block adds to the stream.
  double embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;
  RopeConfig rope;
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

/// Reads the fields of a Hugging Face config.json, in the layout of transformers 5
/// (rope_parameters, dtype) or of the Hub (rope_theta, rope_scaling, torch_dtype).
/// Errors   FileError that starts with `origin` and names the field: missing, of a wrong type, out
///          of range, heads that do not divide, sliding windows in use, unknown rope type,
///          activation or model_type (with a suggestion).
[[nodiscard]] ModelConfig parse_model_config(const nlohmann::json& json, std::string_view origin);
/// The same as a Hub config.json: parse_model_config(to_json(c)) == c.
[[nodiscard]] nlohmann::json to_json(const ModelConfig& config);

}  // namespace isoshard
