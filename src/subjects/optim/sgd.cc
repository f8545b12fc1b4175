// SPDX-License-Identifier: Apache-2.0
// torch.optim.SGD with momentum (dampening 0, no Nesterov), in
// the order of operations of its single-tensor loop.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <utility>

#include "core/base/error.h"
#include "core/tensor/scale.h"
#include "subjects/optim/rules.h"

namespace isoshard::detail {
namespace {

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const OptimizerSettings& settings) : settings_(settings) {}

  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    const at::NoGradGuard no_grad;
    check_same_names(parameters, gradients);
    for (auto& [name, parameter] : parameters) {
      const at::Tensor& gradient = gradient_of(name, parameter, gradients);
      if (gradient.defined()) step_one(name, parameter, gradient);
    }
  }

  void set_learning_rate(double rate) override { settings_.learning_rate = rate; }

  [[nodiscard]] NamedTensors state() const override {
    NamedTensors result;
    for (const auto& [name, buffer] : momentum_buffers_)
      result.emplace(name + std::string(kBuffer), buffer);
    return result;
  }

  [[nodiscard]] std::string_view rule() const override {
    return settings_.momentum != 0 ? "sgd with momentum" : "sgd";
  }
  [[nodiscard]] UpdateCounts updates() const override { return {}; }

  void restore(const NamedTensors& state, const UpdateCounts& updates) override {
    if (!updates.empty())
      throw ShapeError(fmt::format("SGD must be given no update counts, got {}", updates.size()));
    NamedTensors restored;
    for (const auto& [name, buffer] : state) {
      if (settings_.momentum == 0 || !name.ends_with(kBuffer))
        throw ShapeError(fmt::format("{} has no state {}", rule(), name));
      restored.emplace(name.substr(0, name.size() - kBuffer.size()), buffer);
    }
    momentum_buffers_ = std::move(restored);
  }

 private:
  static constexpr std::string_view kBuffer = ".momentum_buffer";

  void step_one(const std::string& name, at::Tensor& parameter, at::Tensor gradient) {
    if (settings_.weight_decay != 0) gradient = gradient.add(parameter, settings_.weight_decay);
    if (settings_.momentum != 0) {
      const auto [entry, first] = momentum_buffers_.try_emplace(name);
      if (first) {
        entry->second = gradient.detach().clone();
      } else {
        scale_in_place(entry->second, settings_.momentum);
        entry->second.add_(gradient, 1);
      }
      gradient = entry->second;
    }
    parameter.add_(gradient, -settings_.learning_rate);
  }

  OptimizerSettings settings_;
  NamedTensors momentum_buffers_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const OptimizerSettings& settings) {
  return std::make_unique<Sgd>(settings);
}

}  // namespace isoshard::detail
