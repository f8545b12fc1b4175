// SPDX-License-Identifier: Apache-2.0
/// Groups of config.json fields that several architectures have in common.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "subjects/model/config/config.h"
#include "subjects/model/config/config_fields.h"

namespace isoshard {

/// Sizes, heads, norm, init, tying of a decoder with rotary positions and a gated mlp (Qwen2,
/// Qwen3, Llama); not qkv_bias.
/// Errors   FileError as ConfigFields; also heads that do not divide, an odd head dim, an
///          activation other than silu, an unknown dtype, sliding windows in use.
[[nodiscard]] ModelConfig parse_rotary_decoder(const ConfigFields& fields);

/// rope_parameters (transformers 5) or rope_theta with rope_scaling (Hub). Errors   FileError for
/// any type but default and llama3, for partial rotation, and if the two layouts are both there and
/// disagree.
[[nodiscard]] RopeConfig parse_rope(const ConfigFields& fields);

/// Errors   FileError if dtype or torch_dtype names no floating-point type.
void check_dtype_field(const ConfigFields& fields);
/// 0 if the field is not there.   Errors   FileError unless it is in [0, 1).
[[nodiscard]] double dropout_rate(const ConfigFields& fields, const char* field);

/// Type, vocabulary, widths, layers, heads and positions of a decoder, under the Hub's names.
[[nodiscard]] nlohmann::json sizes_to_json(const ModelConfig& config);

/// The fields that parse_rotary_decoder reads, in the Hub's layout.
[[nodiscard]] nlohmann::json rotary_decoder_to_json(const ModelConfig& config);

}  // namespace isoshard
