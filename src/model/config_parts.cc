// SPDX-License-Identifier: Apache-2.0
// Groups of config.json fields that several architectures have in common.
#include "model/config_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/dtype.h"
#include "base/error.h"
#include "base/suggest.h"

namespace isoshard {
namespace {

constexpr std::array<std::string_view, 6> kRopeTypesNotBuilt{"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"};

void check_rope_type(const ConfigFields& fields, std::string_view field, const std::string& type) {
  if (type == "default") return;
  if (std::ranges::find(kRopeTypesNotBuilt, type) != kRopeTypesNotBuilt.end()) {
    fields.fail(field, fmt::format("is '{}': this rope type is not built; only default is", type));
  }
  const std::vector<std::string> known{"default"};
  fields.fail(field, fmt::format("is '{}': unknown rope type{}; only default is built", type, did_you_mean(type, known)));
}

/// rope_parameters or rope_scaling: both name the type, older files under "type".
void check_rope_object(const ConfigFields& rope) {
  const char* const field = rope.has("rope_type") ? "rope_type" : "type";
  check_rope_type(rope, field, rope.text(field));
  if (rope.has("partial_rotary_factor") && rope.positive_number("partial_rotary_factor") != 1) {
    rope.fail("partial_rotary_factor", "is not 1: partial rotation is not built");
  }
}

void refuse_sliding_windows(const ConfigFields& fields) {
  if (fields.has("use_sliding_window") && fields.boolean("use_sliding_window")) {
    fields.fail("use_sliding_window", "is true: sliding windows are not built");
  }
  // Without the switch a window is in use as soon as it has a size.
  if (!fields.has("use_sliding_window") && fields.has("sliding_window")) {
    fields.fail("sliding_window", "is set and use_sliding_window is not false: sliding windows are not built");
  }
  if (!fields.has("layer_types")) return;
  const nlohmann::json& types = fields.value("layer_types");
  if (!types.is_array()) fields.fail("layer_types", "is no array");
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "full_attention") {
      fields.fail(fmt::format("layer_types[{}]", i), fmt::format("is {}: only full_attention is built", types[i].dump()));
    }
  }
  if (static_cast<std::int64_t>(types.size()) != fields.positive_integer("num_hidden_layers")) {
    fields.fail("layer_types", fmt::format("has {} entries for {} layers", types.size(), fields.positive_integer("num_hidden_layers")));
  }
}

void check_dtype(const ConfigFields& fields) {
  for (const char* const field : {"dtype", "torch_dtype"}) {
    if (!fields.has(field)) continue;
    try {
      if (!is_floating(parse_dtype(fields.text(field)))) fields.fail(field, "is no floating-point type");
    } catch (const UsageError& error) {
      fields.fail(field, fmt::format("is not known: {}", error.what()));
    }
  }
}

void check_activation(const ConfigFields& fields) {
  const std::string activation = fields.text("hidden_act");
  if (activation == "silu" || activation == "swish") return;
  const std::vector<std::string> known{"silu"};
  fields.fail("hidden_act", fmt::format("is '{}': unknown activation{}; only silu is built", activation, did_you_mean(activation, known)));
}

void check_heads(const ConfigFields& fields, const ModelConfig& config) {
  if (config.num_heads % config.num_kv_heads != 0) {
    fields.fail("num_attention_heads",
                fmt::format("is {}, which num_key_value_heads {} does not divide", config.num_heads, config.num_kv_heads));
  }
  if (config.head_dim % 2 != 0) fields.fail("head_dim", fmt::format("is {}: rotary positions need an even one", config.head_dim));
}

std::int64_t parse_head_dim(const ConfigFields& fields, const ModelConfig& config) {
  if (fields.has("head_dim")) return fields.positive_integer("head_dim");
  if (config.hidden_size % config.num_heads != 0) {
    fields.fail("hidden_size", fmt::format("is {}, which num_attention_heads {} does not divide, and there is no head_dim",
                                           config.hidden_size, config.num_heads));
  }
  return config.hidden_size / config.num_heads;
}

}  // namespace

RopeConfig parse_rope(const ConfigFields& fields) {
  RopeConfig rope;
  const bool has_hub_theta = fields.has("rope_theta");
  if (fields.has("rope_scaling")) check_rope_object(fields.object("rope_scaling"));
  if (!fields.has("rope_parameters")) {
    if (!has_hub_theta) fields.fail("rope_theta", "is missing, and so is rope_parameters");
    rope.theta = fields.positive_number("rope_theta");
    return rope;
  }
  const ConfigFields parameters = fields.object("rope_parameters");
  check_rope_object(parameters);
  rope.theta = parameters.positive_number("rope_theta");
  if (has_hub_theta && fields.positive_number("rope_theta") != rope.theta) {
    fields.fail("rope_theta",
                fmt::format("is {}, rope_parameters.rope_theta {}: which one holds?", fields.positive_number("rope_theta"), rope.theta));
  }
  return rope;
}

ModelConfig parse_rotary_decoder(const ConfigFields& fields) {
  ModelConfig config;
  config.vocab_size = fields.positive_integer("vocab_size");
  config.hidden_size = fields.positive_integer("hidden_size");
  config.intermediate_size = fields.positive_integer("intermediate_size");
  config.num_layers = fields.positive_integer("num_hidden_layers");
  config.num_heads = fields.positive_integer("num_attention_heads");
  config.num_kv_heads = fields.positive_integer("num_key_value_heads");
  config.head_dim = parse_head_dim(fields, config);
  config.max_positions = fields.positive_integer("max_position_embeddings");
  config.norm_eps = fields.positive_number("rms_norm_eps");
  config.initializer_range = fields.non_negative_number("initializer_range");
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings");
  config.rope = parse_rope(fields);
  check_heads(fields, config);
  check_activation(fields);
  check_dtype(fields);
  refuse_sliding_windows(fields);
  if (fields.has("attention_dropout") && fields.non_negative_number("attention_dropout") != 0) {
    fields.fail("attention_dropout", "is not 0: dropout is not built");
  }
  return config;
}

nlohmann::json rotary_decoder_to_json(const ModelConfig& config) {
  return {{"model_type", config.model_type},
          {"vocab_size", config.vocab_size},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_hidden_layers", config.num_layers},
          {"num_attention_heads", config.num_heads},
          {"num_key_value_heads", config.num_kv_heads},
          {"head_dim", config.head_dim},
          {"max_position_embeddings", config.max_positions},
          {"rms_norm_eps", config.norm_eps},
          {"initializer_range", config.initializer_range},
          {"tie_word_embeddings", config.tie_word_embeddings},
          {"rope_theta", config.rope.theta},
          {"rope_scaling", nullptr},
          {"hidden_act", "silu"},
          {"attention_dropout", 0.0},
          {"use_sliding_window", false},
          {"torch_dtype", "float32"}};
}

}  // namespace isoshard
