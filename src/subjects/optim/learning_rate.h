// SPDX-License-Identifier: Apache-2.0
/// The learning rate of each step.
#pragma once
#include <cstdint>
#include <string_view>

namespace isoshard {

struct LearningRateSettings {
  enum class Kind : std::uint8_t { kConstant, kLinear, kCosine } kind = Kind::kConstant;
  std::int64_t warmup_steps = 0;
  /// Linear and cosine: the step from which on the rate is `min_rate`; warm-up included.
  std::int64_t total_steps = 0;
  double min_rate = 0;  ///< linear and cosine: where the rate goes to
  friend bool operator==(const LearningRateSettings&, const LearningRateSettings&) = default;
};
/// Constant, linear, cosine.
[[nodiscard]] std::string_view name_of(LearningRateSettings::Kind kind) noexcept;
/// Errors   UsageError that lists the names.
[[nodiscard]] LearningRateSettings::Kind parse_learning_rate_schedule(std::string_view name);

/// A seam: a faulty test double may stand in from outside. The class itself is the right schedule.
///
/// With base rate r, warm-up W, total T, minimum m, at step t (from 0): r t / max(1, W) while t <
/// W. Then, with p = (t - W) / max(1, T - W), at most 1: constant r; linear m + (r - m) (1 - p);
/// cosine m + (r - m) (1 + cos(pi p)) / 2. As in the source, step 0 of a warm-up has rate 0.
///
/// Errors        UsageError from the constructor: steps below 0, a minimum that is not in [0, base
///               rate], linear or cosine whose total is not above its warm-up.
/// Determinism   a pure function of the step, in double.
/// Source        transformers/optimization.py: get_constant_schedule_with_warmup,
///               get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup,
///               get_cosine_with_min_lr_schedule_with_warmup.
class LearningRate {
 public:
  LearningRate(double base_rate, const LearningRateSettings& settings);
  virtual ~LearningRate() = default;
  [[nodiscard]] virtual double at(std::int64_t step) const;

 private:
  double base_rate_;
  LearningRateSettings settings_;
};

}  // namespace isoshard
