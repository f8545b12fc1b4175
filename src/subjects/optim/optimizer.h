// SPDX-License-Identifier: Apache-2.0
/// Optimizers with the update rules of torch.optim, on named parameters.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

struct OptimizerSettings {
  enum class Kind : std::uint8_t { kSgd, kAdamW } kind = Kind::kAdamW;
  double learning_rate = 1e-3;
  double weight_decay = 0.0;
  double momentum = 0.0;                          ///< SGD
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  ///< AdamW
};
[[nodiscard]] std::string_view name_of(OptimizerSettings::Kind kind) noexcept;  ///< sgd, adamw
/// Errors   UsageError that lists the names.
[[nodiscard]] OptimizerSettings::Kind parse_optimizer(std::string_view name);

using NamedTensors = std::map<std::string, at::Tensor, std::less<>>;
/// Updates made so far, by parameter.
using UpdateCounts = std::map<std::string, std::int64_t, std::less<>>;

/// Steps named parameters in place by their gradients.
/// Determinism   element-wise; the result of an element does not depend on what else is in the map.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Both maps have the same names; a parameter without gradient (undefined tensor) is left alone,
  /// as torch does.
  virtual void step(NamedTensors& parameters, const NamedTensors& gradients) = 0;
  /// Sets the learning rate of the steps to come. Before the first call it is that of the settings.
  virtual void set_learning_rate(double rate) = 0;
  /// State tensors by "<parameter>.<state>", for example "model.norm.weight.exp_avg",
  /// "....momentum_buffer".
  [[nodiscard]] virtual NamedTensors state() const = 0;
  /// What state() holds: "adamw", "sgd", "sgd with momentum". State of one rule means nothing to
  /// another.
  [[nodiscard]] virtual std::string_view rule() const = 0;
  /// What the rule counts, for corrections that depend on it; empty if it counts nothing.
  [[nodiscard]] virtual UpdateCounts updates() const = 0;
  /// Resumes from the results of state() and updates() of an optimizer of the same rule. Call it
  /// before the first step.
  /// Errors   ShapeError for state that the rule does not have, or that is missing.
  virtual void restore(const NamedTensors& state, const UpdateCounts& updates) = 0;
};

/// Source   torch.optim.SGD (single-tensor loop) and torch.optim.AdamW, torch 2.11.
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& settings);

}  // namespace isoshard
