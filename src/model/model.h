// SPDX-License-Identifier: Apache-2.0
/// A model: its parameters by Hugging Face name and its forward pass, written once for every strategy.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/param_class.h"
#include "model/config.h"
#include "model/strategy.h"

namespace isoshard {

enum class ParamInit : std::uint8_t { kNormal, kZeros, kOnes };

/// One parameter, unsharded.
struct ParameterSpec {
  std::string name;     ///< model.layers.0.self_attn.q_proj.weight
  Shape shape;
  ParamClass param_class = ParamClass::kMatrix;
  ParamInit init = ParamInit::kNormal;
};

/// This rank's tensors by parameter name. A tied head has no entry of its own.
using Parameters = std::map<std::string, at::Tensor, std::less<>>;

/// Guarantees   stateless: forward may run for any Parameters, Strategy and Sink; every listed point is tapped.
class Model {
 public:
  virtual ~Model() = default;
  [[nodiscard]] virtual const ModelConfig& config() const noexcept = 0;
  /// All parameters in model order, unsharded; a tied head is left out.
  [[nodiscard]] virtual std::vector<ParameterSpec> parameters() const = 0;
  /// Shapes   input_ids int64 [B,S]; returns logits [B,S,V] in the parameters' dtype.
  [[nodiscard]] virtual at::Tensor forward(const at::Tensor& input_ids_BS, const Parameters& parameters, const Strategy& strategy,
                                           Sink* sink) const = 0;
};

/// Errors   UsageError for a model_type that no registered architecture has.
[[nodiscard]] std::unique_ptr<Model> make_model(const ModelConfig& config, AttentionImpl attention);
[[nodiscard]] std::vector<std::string> model_types();

}  // namespace isoshard
