// SPDX-License-Identifier: Apache-2.0
// Groups of config.json fields that several architectures have in common.
#include "subjects/model/config/config_parts.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>

#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {

constexpr std::array<std::string_view, 5> kRopeTypesNotBuilt{"linear", "dynamic", "yarn",
                                                             "longrope", "proportional"};

void check_rope_type(const ConfigFields& fields, std::string_view field, const std::string& type) {
  if (type == "default" || type == "llama3") return;
  if (std::ranges::find(kRopeTypesNotBuilt, type) != kRopeTypesNotBuilt.end()) {
    fields.fail(
        field,
        fmt::format("must be default or llama3, the rope types that are built, got '{}'", type));
  }
  const std::vector<std::string> known{"default", "llama3"};
  fields.fail(field, fmt::format("must be default or llama3, got the unknown rope type '{}'{}",
                                 type, did_you_mean(type, known)));
}

/// rope_parameters or rope_scaling: both name the type, older files under "type". Everything but
/// theta.
RopeConfig parse_rope_object(const ConfigFields& fields) {
  RopeConfig rope;
  const char* const field = fields.has("rope_type") ? "rope_type" : "type";
  rope.type = fields.text(field);
  check_rope_type(fields, field, rope.type);
  if (fields.has("partial_rotary_factor") && fields.positive_number("partial_rotary_factor") != 1) {
    fields.fail("partial_rotary_factor", "must be 1, because partial rotation is not built");
  }
  if (rope.type != "llama3") return rope;
  rope.factor = fields.positive_number("factor");
  rope.low_freq_factor = fields.positive_number("low_freq_factor");
  rope.high_freq_factor = fields.positive_number("high_freq_factor");
  rope.original_max_positions = fields.positive_integer("original_max_position_embeddings");
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    fields.fail("high_freq_factor", fmt::format("must be above low_freq_factor {}, got {}",
                                                rope.low_freq_factor, rope.high_freq_factor));
  }
  return rope;
}

nlohmann::json rope_scaling_to_json(const RopeConfig& rope) {
  if (rope.type == "default") return nullptr;
  return {{"rope_type", rope.type},
          {"factor", rope.factor},
          {"low_freq_factor", rope.low_freq_factor},
          {"high_freq_factor", rope.high_freq_factor},
          {"original_max_position_embeddings", rope.original_max_positions}};
}

void refuse_sliding_windows(const ConfigFields& fields) {
  if (fields.has("use_sliding_window") && fields.boolean("use_sliding_window")) {
    fields.fail("use_sliding_window", "must be false, because sliding windows are not built");
  }
  // Without the switch a window is in use as soon as it has a size.
  if (!fields.has("use_sliding_window") && fields.has("sliding_window")) {
    fields.fail("sliding_window",
                "must not be set unless use_sliding_window is false, because sliding windows are "
                "not built");
  }
  if (!fields.has("layer_types")) return;
  const nlohmann::json& types = fields.value("layer_types");
  if (!types.is_array()) fields.fail("layer_types", "must be an array");
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "full_attention") {
      fields.fail(fmt::format("layer_types[{}]", i),
                  fmt::format("must be full_attention, the only type that is built, got {}",
                              types[i].dump()));
    }
  }
  if (static_cast<std::int64_t>(types.size()) != fields.positive_integer("num_hidden_layers")) {
    fields.fail("layer_types",
                fmt::format("must have an entry for each of the {} layers, got {}",
                            fields.positive_integer("num_hidden_layers"), types.size()));
  }
}

void check_activation(const ConfigFields& fields) {
  const std::string activation = fields.text("hidden_act");
  if (activation == "silu" || activation == "swish") return;
  const std::vector<std::string> known{"silu"};
  fields.fail("hidden_act",
              fmt::format("must be silu, the only activation that is built, got '{}'{}", activation,
                          did_you_mean(activation, known)));
}

void check_heads(const ConfigFields& fields, const ModelConfig& config) {
  if (config.num_heads % config.num_kv_heads != 0) {
    fields.fail("num_attention_heads",
                fmt::format("must be divisible by num_key_value_heads {}, got {}",
                            config.num_kv_heads, config.num_heads));
  }
  if (config.head_dim % 2 != 0)
    fields.fail("head_dim",
                fmt::format("must be even for rotary positions, got {}", config.head_dim));
}

std::int64_t parse_head_dim(const ConfigFields& fields, const ModelConfig& config) {
  if (fields.has("head_dim")) return fields.positive_integer("head_dim");
  if (config.hidden_size % config.num_heads != 0) {
    fields.fail(
        "hidden_size",
        fmt::format("must be divisible by num_attention_heads {} where head_dim is missing, got {}",
                    config.num_heads, config.hidden_size));
  }
  return config.hidden_size / config.num_heads;
}

}  // namespace

RopeConfig parse_rope(const ConfigFields& fields) {
  const bool has_hub_theta = fields.has("rope_theta");
  RopeConfig hub;
  if (fields.has("rope_scaling")) hub = parse_rope_object(fields.object("rope_scaling"));
  if (!fields.has("rope_parameters")) {
    if (!has_hub_theta) fields.fail("rope_theta", "is missing, and so is rope_parameters");
    hub.theta = fields.positive_number("rope_theta");
    return hub;
  }
  const ConfigFields parameters = fields.object("rope_parameters");
  RopeConfig rope = parse_rope_object(parameters);
  if (fields.has("rope_scaling") && hub != rope)
    fields.fail("rope_scaling", "and rope_parameters must agree; remove one of them");
  rope.theta = parameters.positive_number("rope_theta");
  if (has_hub_theta && fields.positive_number("rope_theta") != rope.theta) {
    fields.fail("rope_theta",
                fmt::format("must equal rope_parameters.rope_theta {}, got {}; remove one of them",
                            rope.theta, fields.positive_number("rope_theta")));
  }
  return rope;
}

void check_dtype_field(const ConfigFields& fields) {
  for (const char* const field : {"dtype", "torch_dtype"}) {
    if (!fields.has(field)) continue;
    try {
      if (!is_floating(parse_dtype(fields.text(field))))
        fields.fail(field, "must be a floating-point type");
    } catch (const UsageError& error) {
      fields.fail(field, fmt::format("is not known: {}", error.what()));
    }
  }
}

double dropout_rate(const ConfigFields& fields, const char* field) {
  if (!fields.has(field)) return 0;
  const double rate = fields.non_negative_number(field);
  if (rate >= 1) fields.fail(field, fmt::format("must be a probability below 1, got {}", rate));
  return rate;
}

ModelConfig parse_rotary_decoder(const ConfigFields& fields) {
  ModelConfig config;
  config.vocab_size = fields.positive_integer("vocab_size");
  config.hidden_size = fields.positive_integer("hidden_size");
  config.intermediate_size = fields.positive_integer("intermediate_size");
  config.num_layers = fields.num_layers("num_hidden_layers");
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
  check_dtype_field(fields);
  refuse_sliding_windows(fields);
  config.attention_dropout = dropout_rate(fields, "attention_dropout");
  return config;
}

nlohmann::json sizes_to_json(const ModelConfig& config) {
  return {{"model_type", config.model_type},
          {"vocab_size", config.vocab_size},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_hidden_layers", config.num_layers},
          {"num_attention_heads", config.num_heads},
          {"num_key_value_heads", config.num_kv_heads},
          {"head_dim", config.head_dim},
          {"max_position_embeddings", config.max_positions}};
}

nlohmann::json rotary_decoder_to_json(const ModelConfig& config) {
  nlohmann::json json = sizes_to_json(config);
  json.update({{"rms_norm_eps", config.norm_eps},
               {"initializer_range", config.initializer_range},
               {"tie_word_embeddings", config.tie_word_embeddings},
               {"rope_theta", config.rope.theta},
               {"rope_scaling", rope_scaling_to_json(config.rope)},
               {"hidden_act", "silu"},
               {"attention_dropout", config.attention_dropout},
               {"use_sliding_window", false},
               {"torch_dtype", "float32"}});
  return json;
}

}  // namespace isoshard
