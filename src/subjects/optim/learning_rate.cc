// SPDX-License-Identifier: Apache-2.0
// Warm-up, then constant, linear or cosine.
#include "subjects/optim/learning_rate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {
using Kind = LearningRateSettings::Kind;
}

std::string_view name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::kConstant:
      return "constant";
    case Kind::kLinear:
      return "linear";
    case Kind::kCosine:
      return "cosine";
  }
  return "unknown";
}

Kind parse_learning_rate_schedule(std::string_view name) {
  std::vector<std::string> known;
  for (const Kind kind : {Kind::kConstant, Kind::kLinear, Kind::kCosine}) {
    if (name == name_of(kind)) return kind;
    known.emplace_back(name_of(kind));
  }
  throw UsageError(fmt::format("unknown learning rate schedule '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

LearningRate::LearningRate(double base_rate, const LearningRateSettings& settings)
    : base_rate_(base_rate), settings_(settings) {
  if (settings.warmup_steps < 0 || settings.total_steps < 0) {
    throw UsageError(
        fmt::format("the steps of a learning rate schedule and of its warm-up must be at least 0, "
                    "got {} and {}",
                    settings.total_steps, settings.warmup_steps));
  }
  if (!(settings.min_rate >= 0 && settings.min_rate <= base_rate)) {
    throw UsageError(
        fmt::format("the lowest learning rate must be from 0 to the learning rate {}, got {}",
                    base_rate, settings.min_rate));
  }
  if (settings.kind == Kind::kConstant && settings.min_rate != 0) {
    throw UsageError(fmt::format(
        "a lowest learning rate of {} requires a linear or cosine schedule", settings.min_rate));
  }
  if (settings.kind != Kind::kConstant && settings.total_steps <= settings.warmup_steps) {
    throw UsageError(fmt::format(
        "the warm-up of a {} schedule of {} steps must be shorter than the schedule, got {}",
        name_of(settings.kind), settings.total_steps, settings.warmup_steps));
  }
}

double LearningRate::at(std::int64_t step) const {
  const std::int64_t warmup = settings_.warmup_steps;
  if (step < warmup)
    return base_rate_ *
           (static_cast<double>(step) / static_cast<double>(std::max<std::int64_t>(1, warmup)));
  if (settings_.kind == Kind::kConstant) return base_rate_;
  const double progress = std::min(1.0, static_cast<double>(step - warmup) /
                                            static_cast<double>(settings_.total_steps - warmup));
  const double left = settings_.kind == Kind::kLinear
                          ? 1.0 - progress
                          : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return settings_.min_rate + (base_rate_ - settings_.min_rate) * left;
}

}  // namespace isoshard
