// SPDX-License-Identifier: Apache-2.0
// Names of the optimizers, the choice between them, and the checks of a step's arguments.
#include "subjects/optim/optimizer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "subjects/optim/rules.h"

namespace isoshard {
namespace {

void check_range(std::string_view what, double value, bool valid, std::string_view range) {
  if (!valid || !std::isfinite(value))
    throw UsageError(fmt::format("{} must be {}, got {}", what, range, value));
}

void check(const OptimizerSettings& settings) {
  check_range("learning rate", settings.learning_rate, settings.learning_rate >= 0,
              "a finite number >= 0");
  check_range("weight decay", settings.weight_decay, settings.weight_decay >= 0,
              "a finite number >= 0");
  check_range("momentum", settings.momentum, settings.momentum >= 0, "a finite number >= 0");
  check_range("beta1", settings.beta1, settings.beta1 >= 0 && settings.beta1 < 1,
              "a number in [0, 1)");
  check_range("beta2", settings.beta2, settings.beta2 >= 0 && settings.beta2 < 1,
              "a number in [0, 1)");
  check_range("eps", settings.eps, settings.eps >= 0, "a finite number >= 0");
}

}  // namespace

std::string_view name_of(OptimizerSettings::Kind kind) noexcept {
  switch (kind) {
    case OptimizerSettings::Kind::kSgd:
      return "sgd";
    case OptimizerSettings::Kind::kAdamW:
      return "adamw";
  }
  return "unknown";
}

OptimizerSettings::Kind parse_optimizer(std::string_view name) {
  using Kind = OptimizerSettings::Kind;
  std::vector<std::string> known;
  for (const Kind kind : {Kind::kSgd, Kind::kAdamW}) {
    if (name == name_of(kind)) return kind;
    known.emplace_back(name_of(kind));
  }
  throw UsageError(fmt::format("unknown optimizer '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& settings) {
  check(settings);
  return settings.kind == OptimizerSettings::Kind::kSgd ? detail::make_sgd(settings)
                                                        : detail::make_adamw(settings);
}

namespace detail {

const at::Tensor& gradient_of(const std::string& name, const at::Tensor& parameter,
                              const NamedTensors& gradients) {
  const auto found = gradients.find(name);
  if (found == gradients.end()) {
    throw ShapeError(fmt::format(
        "no entry for the gradient of {}: pass an undefined tensor if it has none", name));
  }
  const at::Tensor& gradient = found->second;
  if (gradient.defined() && gradient.sizes() != parameter.sizes()) {
    throw ShapeError(
        fmt::format("the gradient of {} must have the shape [{}] of the parameter, got [{}]", name,
                    fmt::join(parameter.sizes(), ", "), fmt::join(gradient.sizes(), ", ")));
  }
  return gradient;
}

void check_same_names(const NamedTensors& parameters, const NamedTensors& gradients) {
  for (const auto& [name, gradient] : gradients) {
    if (!parameters.contains(name))
      throw ShapeError(fmt::format("a gradient must belong to a parameter, got one for {}", name));
  }
}

}  // namespace detail
}  // namespace isoshard
