// SPDX-License-Identifier: Apache-2.0
/// Measures the judge on clean cases: how near their errors come to the tolerances, and how often
/// it raises a false alarm.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/verdict/verdict.h"
#include "suite/verify/verify_case.h"

namespace isoshard {

/// The share of their tolerances that the clean cases of one dtype used: one number for each
/// comparison with any difference.
struct Spread {
  std::vector<double> relative;  ///< relative error / allowed
  std::vector<double> scale;     ///< scale error / allowed
  /// scale error / allowed relative error, of tensors of many even elements: what the constant 0.1
  /// of the scale's tolerance must be above
  std::vector<double> along;
  std::vector<double> insensitive;  ///< error norm / allowed, of insensitive tensors
  std::vector<double> sensitivity;  ///< the smallest scale error that would have been rejected
  /// scale error / allowed, and shift / allowed, of pools against redrawn runs
  std::vector<double> pooled_scale, pooled_shift;
  /// Measured / published bound, one number for each bound of a case.
  std::vector<double> published;
  std::int64_t comparisons = 0;  ///< at level perturbed
  std::int64_t equal = 0;        ///< of them without any difference
};

/// One clean case that diverged or was inconclusive.
struct FalseAlarm {
  std::int64_t index = 0;
  std::string case_slug, reason;
};

/// kUsual: clean_case, ddp and autotp. kThorough: thorough_case, every subject.
enum class CaseStream : std::uint8_t { kUsual, kThorough };
/// usual, thorough.
[[nodiscard]] std::string_view name_of(CaseStream stream) noexcept;
/// Case `index` of the stream's `seed`.
[[nodiscard]] Case case_of(CaseStream stream, std::uint64_t seed, std::int64_t index);

class Calibration {
 public:
  /// kPlain measures tolerances; kAuto is the default of `isoshard verify`.
  explicit Calibration(std::uint64_t seed, ReferenceKind kind = ReferenceKind::kPlain,
                       CaseStream stream = CaseStream::kUsual)
      : seed_(seed), kind_(kind), stream_(stream) {}

  /// Runs clean case `index`, adds its measurements and returns its verdict.
  /// Errors   InfrastructureError if its world breaks down.
  Verdict run(std::int64_t index);

  /// Adds a verdict as run() would.
  void add(std::int64_t index, const Case& c, const Verdict& verdict);

  /// Cases that diverged.
  [[nodiscard]] const std::vector<FalseAlarm>& false_alarms() const noexcept {
    return false_alarms_;
  }
  /// Cases whose verdict is vacuous: not a false alarm, but not a pass either.
  [[nodiscard]] const std::vector<FalseAlarm>& vacuous() const noexcept { return vacuous_; }
  [[nodiscard]] std::int64_t cases() const noexcept { return cases_; }
  [[nodiscard]] std::int64_t comparisons() const noexcept;
  /// The table of docs/internals/calibration.md: quantiles by dtype and measure, then every false
  /// alarm with the command that repeats it.
  [[nodiscard]] std::string render() const;

 private:
  std::uint64_t seed_;
  ReferenceKind kind_;
  CaseStream stream_;
  std::int64_t cases_ = 0;
  std::map<Dtype, Spread> spreads_;
  std::vector<FalseAlarm> false_alarms_, vacuous_;
};

/// "build/bin/calibrate --seed 1 --first 17 --count 1": repeats one case and prints its whole
/// report.
[[nodiscard]] std::string repeat_command(std::uint64_t seed, std::int64_t index,
                                         CaseStream stream = CaseStream::kUsual);

}  // namespace isoshard
