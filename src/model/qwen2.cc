// SPDX-License-Identifier: Apache-2.0
// Qwen2 and Qwen2.5: a rotary decoder with biases on q, k and v.
#include "model/blocks.h"
#include "model/config_parts.h"
#include "model/registry.h"

namespace isoshard {
namespace {

class Qwen2 final : public Model {
 public:
  Qwen2(const ModelConfig& config, AttentionImpl attention) : config_(config), attention_(attention) {}
  [[nodiscard]] const ModelConfig& config() const noexcept override { return config_; }
  [[nodiscard]] std::vector<ParameterSpec> parameters() const override { return rotary_decoder_parameters(config_); }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input_ids_BS, const Parameters& parameters, const Strategy& strategy,
                                   Sink* sink) const override {
    return rotary_decoder(ForwardPass(parameters, strategy, sink), config_, attention_, input_ids_BS);
  }

 private:
  ModelConfig config_;
  AttentionImpl attention_;
};

ModelConfig parse(const ConfigFields& fields) {
  ModelConfig config = parse_rotary_decoder(fields);
  config.qkv_bias = true;
  return config;
}

nlohmann::json write(const ModelConfig& config) {
  nlohmann::json json = rotary_decoder_to_json(config);
  json["architectures"] = {"Qwen2ForCausalLM"};
  return json;
}

std::unique_ptr<Model> make(const ModelConfig& config, AttentionImpl attention) {
  return std::make_unique<Qwen2>(config, attention);
}

}  // namespace

Architecture qwen2_architecture() {
  return {"qwen2", parse, write, make};
}

}  // namespace isoshard
