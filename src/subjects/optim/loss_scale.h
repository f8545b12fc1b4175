// SPDX-License-Identifier: Apache-2.0
/// The loss scale of fp16 training: gradients too small for fp16 are lifted into its range, and
/// those too large are noticed.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace isoshard {

struct LossScaleSettings {
  enum class Kind : std::uint8_t { kNone, kStatic, kDynamic } kind = Kind::kNone;
  double initial = 65536;  ///< kStatic: always
  double growth_factor = 2, backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< steps without an infinity until the scale grows
  [[nodiscard]] bool is_on() const noexcept { return kind != Kind::kNone; }
  friend bool operator==(const LossScaleSettings&, const LossScaleSettings&) = default;
};

/// The scale of each step, kept in fp32.
///
/// After a step with an infinity or a NaN in any gradient: scale x backoff_factor. After
/// growth_interval steps in a row without: scale x growth_factor, unless that is not a finite fp32
/// number. A static scale stays.
/// Errors        UsageError from the constructor: a scale that is not above 0 and finite in fp32, a
///               growth factor not above 1, a backoff factor not between 0 and 1, an interval below
///               1.
/// Determinism   a function of the flags alone.
/// Source        torch.amp.GradScaler and at::_amp_update_scale_, torch 2.11.
class LossScale {
 public:
  explicit LossScale(const LossScaleSettings& settings);
  [[nodiscard]] double value() const noexcept { return static_cast<double>(scale_); }
  void update(bool found_inf) noexcept;

  /// The state by name, which restore() resumes from.
  [[nodiscard]] std::map<std::string, double, std::less<>> numbers() const;
  /// A static scale stays; without such numbers (a checkpoint of a run that scaled nothing) a
  /// dynamic one begins at `initial`.
  /// Errors   FileError if the scale is not above 0 and finite, or the count is not a whole number
  ///          of at least 0.
  void restore(const std::map<std::string, double, std::less<>>& numbers);

 private:
  LossScaleSettings settings_;
  float scale_;
  std::int64_t steps_without_ = 0;
};

}  // namespace isoshard
