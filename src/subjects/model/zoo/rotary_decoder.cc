// SPDX-License-Identifier: Apache-2.0
// The model of Qwen2, Qwen3 and Llama: pre-norm layers with rotary attention and a gated mlp.
#include "subjects/model/zoo/blocks.h"

namespace isoshard {
namespace {

class RotaryDecoder final : public Model {
 public:
  RotaryDecoder(const ModelConfig& config, AttentionImpl attention)
      : config_(config), attention_(attention) {}
  [[nodiscard]] const ModelConfig& config() const noexcept override { return config_; }
  [[nodiscard]] std::vector<ParameterSpec> parameters() const override {
    return rotary_decoder_parameters(config_);
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input_ids_BS, const Parameters& parameters,
                                   const Strategy& strategy, Sink* sink,
                                   const TrainingPass& training) const override {
    return rotary_decoder(ForwardPass(parameters, strategy, sink, training), config_, attention_,
                          input_ids_BS);
  }

 private:
  ModelConfig config_;
  AttentionImpl attention_;
};

}  // namespace

std::unique_ptr<Model> make_rotary_decoder(const ModelConfig& config, AttentionImpl attention) {
  return std::make_unique<RotaryDecoder>(config, attention);
}

}  // namespace isoshard
