// SPDX-License-Identifier: Apache-2.0
/// The runs of the guideline (docs/internals/seeds.md, 5) at a size that trains on one machine.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"

namespace isoshard {

/// Llama-3-8B scaled down: its width and feed-forward width are divided by 64, its heads and kv
/// heads by 4 (a head has 8 elements), its layers by 8, its vocabulary is the 256 bytes of a text.
/// The ratio of heads to kv heads, of feed-forward to width, the base of the rotary positions, the
/// eps of the norms, untied embeddings and the initializer stay. `layers` may say otherwise: a
/// pipeline needs one a stage.
[[nodiscard]] ModelConfig scaled_llama3(std::int64_t layers = 0);
/// Gives a case this model, and its name.
void use_scaled_llama3(Case& item, std::int64_t layers);

struct ConvergePreset {
  std::string_view name;
  std::string_view summary;
  int local_batch = 4;          ///< samples per dp rank and step, as in the guideline
  std::int64_t num_layers = 0;  ///< 0: those of scaled_llama3
  std::vector<std::string> tests;
};

/// fsdp, 3d, 4d, cp (the rows of the guideline's table), table (all four), interleaved (its example
/// of 1F1B with two stages a rank).
[[nodiscard]] const std::vector<ConvergePreset>& converge_presets();
/// Errors   UsageError with a suggestion and the names.
[[nodiscard]] const ConvergePreset& find_converge_preset(std::string_view name);

/// The control set of a preset: dp 2, 64 tokens a sample of the project's text, fp32, AdamW at 1e-3
/// (linear, 20 of 100 steps of warm-up), clipping at 1.
[[nodiscard]] Case preset_control(const ConvergePreset& preset);

/// A short run on a small model, on which the control set is judged against ddp first: two layers
/// of scaled_llama3 with the control's sizes, data and precision.
[[nodiscard]] Case small_check(const Case& control);

}  // namespace isoshard
