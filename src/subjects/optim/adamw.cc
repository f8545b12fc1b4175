// SPDX-License-Identifier: Apache-2.0
// torch.optim.AdamW, in the order of operations of its
// single-tensor loop (not capturable, no amsgrad).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "core/base/error.h"
#include "core/tensor/scale.h"
#include "subjects/optim/rules.h"

namespace isoshard::detail {
namespace {

class AdamW final : public Optimizer {
 public:
  explicit AdamW(const OptimizerSettings& settings) : settings_(settings) {}

  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    const at::NoGradGuard no_grad;
    check_same_names(parameters, gradients);
    for (auto& [name, parameter] : parameters) {
      const at::Tensor& gradient = gradient_of(name, parameter, gradients);
      if (gradient.defined()) step_one(moments_[name], parameter, gradient);
    }
  }

  void set_learning_rate(double rate) override { settings_.learning_rate = rate; }

  [[nodiscard]] NamedTensors state() const override {
    NamedTensors result;
    for (const auto& [name, moments] : moments_) {
      result.emplace(name + ".exp_avg", moments.exp_avg);
      result.emplace(name + ".exp_avg_sq", moments.exp_avg_sq);
    }
    return result;
  }

  [[nodiscard]] std::string_view rule() const override { return "adamw"; }

  [[nodiscard]] UpdateCounts updates() const override {
    UpdateCounts counts;
    for (const auto& [name, moments] : moments_) counts.emplace(name, moments.steps);
    return counts;
  }

  void restore(const NamedTensors& state, const UpdateCounts& updates) override {
    std::map<std::string, Moments, std::less<>> restored;
    for (const auto& [name, steps] : updates) {
      const auto first = state.find(name + ".exp_avg"), second = state.find(name + ".exp_avg_sq");
      if (steps < 1 || first == state.end() || second == state.end()) {
        throw ShapeError(fmt::format(
            "AdamW's state of {} after {} updates must have exp_avg and exp_avg_sq", name, steps));
      }
      restored[name] = {steps, first->second, second->second};
    }
    if (state.size() != 2 * restored.size()) {
      throw ShapeError(fmt::format(
          "AdamW's state must have 2 tensors for each of the {} parameters, got {} in all",
          restored.size(), state.size()));
    }
    moments_ = std::move(restored);
  }

 private:
  struct Moments {
    /// Of this parameter: one without gradient does not count the step, as in torch
    std::int64_t steps = 0;
    at::Tensor exp_avg, exp_avg_sq;
  };

  void step_one(Moments& moments, at::Tensor& parameter, const at::Tensor& gradient) const {
    if (moments.steps == 0) {
      moments.exp_avg = at::zeros_like(parameter);
      moments.exp_avg_sq = at::zeros_like(parameter);
    }
    ++moments.steps;
    const double lr = settings_.learning_rate, weight_decay = settings_.weight_decay,
                 eps = settings_.eps;
    const double beta1 = settings_.beta1, beta2 = settings_.beta2;
    if (weight_decay != 0) scale_in_place(parameter, 1 - lr * weight_decay);
    moments.exp_avg.lerp_(gradient, 1 - beta1);
    scale_in_place(moments.exp_avg_sq, beta2);
    moments.exp_avg_sq.addcmul_(gradient, gradient, 1 - beta2);

    const auto steps = static_cast<double>(moments.steps);
    const double bias_correction1 = 1 - std::pow(beta1, steps);
    const double bias_correction2 = 1 - std::pow(beta2, steps);
    const double step_size = lr / bias_correction1;
    const at::Tensor denominator =
        (moments.exp_avg_sq.sqrt() / std::pow(bias_correction2, 0.5)).add_(eps);
    parameter.addcdiv_(moments.exp_avg, denominator, -step_size);
  }

  OptimizerSettings settings_;
  std::map<std::string, Moments, std::less<>> moments_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const OptimizerSettings& settings) {
  return std::make_unique<AdamW>(settings);
}

}  // namespace isoshard::detail
