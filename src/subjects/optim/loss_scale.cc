// SPDX-License-Identifier: Apache-2.0
// The rule by which a loss scale grows and shrinks.
#include "subjects/optim/loss_scale.h"

#include <fmt/format.h>

#include <cmath>

#include "core/base/error.h"

namespace isoshard {
namespace {
constexpr const char *kScaleName = "loss_scale", *kStepsName = "loss_scale_steps_without_inf";
constexpr double kMostSteps = 9007199254740992.0;  // a double counts no further one by one
}  // namespace

LossScale::LossScale(const LossScaleSettings& settings)
    : settings_(settings), scale_(static_cast<float>(settings.initial)) {
  if (!(scale_ > 0) || !std::isfinite(scale_)) {
    throw UsageError(
        fmt::format("the loss scale must be above 0 and finite in fp32, got {}", settings.initial));
  }
  if (!(settings.growth_factor > 1) || !std::isfinite(settings.growth_factor)) {
    throw UsageError(fmt::format("the growth factor of the loss scale must be above 1, got {}",
                                 settings.growth_factor));
  }
  if (!(settings.backoff_factor > 0 && settings.backoff_factor < 1)) {
    throw UsageError(
        fmt::format("the backoff factor of the loss scale must be between 0 and 1, got {}",
                    settings.backoff_factor));
  }
  if (settings.growth_interval < 1) {
    throw UsageError(
        fmt::format("the growth interval of the loss scale must be at least 1 step, got {}",
                    settings.growth_interval));
  }
}

void LossScale::update(bool found_inf) noexcept {
  if (settings_.kind != LossScaleSettings::Kind::kDynamic) return;
  if (found_inf) {
    scale_ = static_cast<float>(static_cast<double>(scale_) * settings_.backoff_factor);
    steps_without_ = 0;
    return;
  }
  if (++steps_without_ < settings_.growth_interval) return;
  steps_without_ = 0;
  const auto grown = static_cast<float>(static_cast<double>(scale_) * settings_.growth_factor);
  if (std::isfinite(grown)) scale_ = grown;
}

std::map<std::string, double, std::less<>> LossScale::numbers() const {
  return {{kScaleName, value()}, {kStepsName, static_cast<double>(steps_without_)}};
}

void LossScale::restore(const std::map<std::string, double, std::less<>>& numbers) {
  const auto scale = numbers.find(kScaleName), steps = numbers.find(kStepsName);
  if (settings_.kind != LossScaleSettings::Kind::kDynamic || scale == numbers.end()) return;
  const auto stored = static_cast<float>(scale->second);
  const double count = steps == numbers.end() ? -1 : steps->second;
  if (!(stored > 0) || !std::isfinite(stored))
    throw FileError(fmt::format("the stored loss scale must be above 0 and finite in fp32, got {}",
                                scale->second));
  if (!(count >= 0 && count < kMostSteps) || count != std::floor(count))
    throw FileError(
        fmt::format("the stored count of steps without an infinity must be a whole number of at "
                    "least 0, got {}",
                    count));
  scale_ = stored;
  steps_without_ = static_cast<std::int64_t>(count);
}

}  // namespace isoshard
