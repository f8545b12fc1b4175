// SPDX-License-Identifier: Apache-2.0
/// The architectures of this build: one entry each, one file each (qwen2.cc, ...).
#pragma once
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string_view>

#include "subjects/model/config/config.h"
#include "subjects/model/model.h"

namespace isoshard {

class ConfigFields;

/// Where an architecture's modules drop, so which rates `--dropout` sets.
struct DropoutSites {
  bool embedding = false, attention = false, residual = false;
};
inline constexpr DropoutSites kAllDropouts{true, true, true};

/// The functions of one architecture.
struct Architecture {
  std::string_view model_type;
  /// Reads what config.json says beyond model_type, and refuses what the forward pass does not do.
  ModelConfig (*parse)(const ConfigFields& fields);
  /// The inverse of `parse`, in the Hub's layout, model_type included.
  nlohmann::json (*to_json)(const ModelConfig& config);
  std::unique_ptr<Model> (*make)(const ModelConfig& config, AttentionImpl attention);
  DropoutSites dropout;
};

[[nodiscard]] std::span<const Architecture> architectures();
/// Null if there is none.
[[nodiscard]] const Architecture* find_architecture(std::string_view model_type);
/// "model_type 'qwem2' is unknown (did you mean 'qwen2'?) ...".
[[nodiscard]] std::string unknown_model_type(std::string_view model_type);

/// Sets every rate that the model's architecture has.   Errors   UsageError for one that has none,
/// unless the rate is 0.
void set_dropout(ModelConfig& config, double rate);

[[nodiscard]] Architecture qwen2_architecture();
[[nodiscard]] Architecture qwen3_architecture();
[[nodiscard]] Architecture llama_architecture();
[[nodiscard]] Architecture mistral_architecture();
[[nodiscard]] Architecture gpt2_architecture();
[[nodiscard]] Architecture megatron_gpt_architecture();
[[nodiscard]] Architecture lattice_architecture();

}  // namespace isoshard
