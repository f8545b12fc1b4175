// SPDX-License-Identifier: Apache-2.0
// Sizes, from the published configuration by division.
#include "suite/converge/converge_presets.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "subjects/model/config/builtin.h"
#include "suite/converge/test_set.h"

namespace isoshard {
namespace {

constexpr std::int64_t kWidthDivisor = 64, kHeadDivisor = 4, kLayerDivisor = 8, kBytes = 256;
constexpr int kDefaultSteps = 100, kDefaultWarmup = 20, kDefaultDp = 2, kSeqLength = 64;
constexpr int kCheckSteps = 20, kCheckLayers = 2;

}  // namespace

ModelConfig scaled_llama3(std::int64_t layers) {
  ModelConfig config = builtin_config("meta-llama/Llama-3-8B");
  config.hidden_size /= kWidthDivisor;
  config.intermediate_size /= kWidthDivisor;
  config.num_heads /= kHeadDivisor;
  config.num_kv_heads /= kHeadDivisor;
  config.head_dim = config.hidden_size / config.num_heads;
  config.num_layers = layers > 0 ? layers : config.num_layers / kLayerDivisor;
  config.vocab_size = kBytes;
  return config;
}

void use_scaled_llama3(Case& item, std::int64_t layers) {
  item.config = scaled_llama3(layers);
  item.model_name = fmt::format("llama3_{}_layers", item.config.num_layers);
}

const std::vector<ConvergePreset>& converge_presets() {
  const std::string interleaved = "pp=2,pipeline-schedule=Interleaved1F1B,stages-per-rank=2";
  const std::string three = "tp=2," + interleaved, four = "tp=2,cp=2," + interleaved, cp = "cp=8";
  static const std::vector<ConvergePreset> presets = {
      {"fsdp", "FSDP N: the control set alone", 4, 0, {}},
      {"3d", "FSDP N, TP 2, PP 2", 4, 0, {three}},
      {"4d", "FSDP N, TP 2, CP 2, PP 2", 4, 0, {four}},
      {"cp", "FSDP N, CP M with M = 8", 4, 0, {cp}},
      {"table", "all four rows of the guideline's table", 4, 0, {three, four, cp}},
      {"interleaved",
       "FSDP N, PP 4 with Interleaved 1F1B, local batch 8, two stages a rank",
       8,
       8,
       {"pp=4,pipeline-schedule=Interleaved1F1B,stages-per-rank=2"}}};
  return presets;
}

const ConvergePreset& find_converge_preset(std::string_view name) {
  std::vector<std::string> known;
  for (const ConvergePreset& preset : converge_presets()) {
    if (preset.name == name) return preset;
    known.emplace_back(preset.name);
  }
  throw UsageError(fmt::format("--preset must be one of {}, got '{}'{}", join_names(known), name,
                               did_you_mean(name, known)));
}

Case preset_control(const ConvergePreset& preset) {
  Case control;
  use_scaled_llama3(control, preset.num_layers);
  control.subject = kControlSubject;
  control.degrees.dp = kDefaultDp;
  control.batch_size = preset.local_batch;
  control.seq_length = kSeqLength;
  control.steps = kDefaultSteps;
  control.settings.optimizer = OptimizerSettings{};
  control.settings.schedule.kind = LearningRateSettings::Kind::kLinear;
  control.settings.schedule.warmup_steps = kDefaultWarmup;
  return control;
}

Case small_check(const Case& control) {
  Case small = control;
  use_scaled_llama3(small, kCheckLayers);
  small.weights_path.clear();
  small.truncated = false;
  small.steps = std::min(control.steps, kCheckSteps);
  // ddp has neither.
  small.settings.reduce_dtype.reset();
  small.settings.output_dtype.reset();
  LearningRateSettings& schedule = small.settings.schedule;
  schedule.warmup_steps = std::min<std::int64_t>(schedule.warmup_steps, small.steps / 2);
  schedule.total_steps = 0;
  if (control.config.vocab_size != small.config.vocab_size) {
    small.data = DataSource{};
    small.seq_length = std::min<std::int64_t>(control.seq_length, kSeqLength);
  }
  return small;
}

}  // namespace isoshard
