// SPDX-License-Identifier: Apache-2.0
// Running clean cases and summing up what they use of their tolerances.
#include "suite/calibration/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "suite/calibration/clean_cases.h"
#include "suite/calibration/thorough_cases.h"

namespace isoshard {
namespace {

std::string quantile_row(std::string_view dtype, std::string_view measure,
                         std::vector<double> values) {
  if (values.empty()) return "";
  std::sort(values.begin(), values.end());
  const auto at = [&](double q) {
    return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
  };
  return fmt::format("| {} | {} | {} | {:.3g} | {:.3g} | {:.3g} | {:.3g} | {:.3g} |\n", dtype,
                     measure, values.size(), at(0.5), at(0.9), at(0.99), at(0.999), values.back());
}

/// Large tensors without large elements: independent errors have little along the reference. In
/// fp64 the statistic's own roundings are as large.
bool is_even(const Stats& stats, Dtype dtype) {
  return dtype != Dtype::kFloat64 && 4 / std::sqrt(static_cast<double>(stats.numel)) < 0.3 &&
         4 * stats.max_abs_reference < 0.3 * std::sqrt(stats.sum_sq_reference);
}

}  // namespace

std::string_view name_of(CaseStream stream) noexcept {
  return stream == CaseStream::kThorough ? "thorough" : "usual";
}

Case case_of(CaseStream stream, std::uint64_t seed, std::int64_t index) {
  return stream == CaseStream::kThorough ? thorough_case(seed, index) : clean_case(seed, index);
}

Verdict Calibration::run(std::int64_t index) {
  const Case c = case_of(stream_, seed_, index);
  Verdict verdict = CaseJudge({.reference = kind_}).judge_case(c).verdict;
  add(index, c, verdict);
  return verdict;
}

void Calibration::add(std::int64_t index, const Case& c, const Verdict& verdict) {
  ++cases_;
  Spread& spread = spreads_[c.dtype];
  for (const TensorComparison& t : verdict.tensors) {
    if (t.level != Level::kPerturbed) continue;
    ++spread.comparisons;
    if (!t.insensitive) spread.sensitivity.push_back(t.scale_sensitivity);
    if (t.stats.unequal_values == 0) {
      ++spread.equal;
    } else if (t.insensitive) {
      spread.insensitive.push_back(std::sqrt(t.stats.sum_sq_diff) / t.allowed_absolute);
    } else {
      spread.relative.push_back(t.stats.relative_error() / t.allowed_relative_error);
      spread.scale.push_back(std::fabs(t.stats.scale() - 1) / t.allowed_scale_error);
      if (is_even(t.stats, c.dtype))
        spread.along.push_back(std::fabs(t.stats.scale() - 1) / t.allowed_relative_error);
    }
  }
  for (const PooledComparison& p : verdict.pools) {
    spread.pooled_scale.push_back(p.allowed_scale.used_by(p.scale));
    spread.pooled_shift.push_back(p.allowed_shift.used_by(p.shift));
  }
  for (const PublishedBound& bound : verdict.published)
    spread.published.push_back(bound.measured / bound.limit);
  if (verdict.status == Status::kConforms) return;
  std::vector<FalseAlarm>& list = verdict.status == Status::kVacuous ? vacuous_ : false_alarms_;
  list.push_back({index, c.slug(), fmt::format("{}: {}", name_of(verdict.status), verdict.reason)});
}

std::int64_t Calibration::comparisons() const noexcept {
  std::int64_t sum = 0;
  for (const auto& [dtype, spread] : spreads_) sum += spread.comparisons;
  return sum;
}

std::string Calibration::render() const {
  std::string text = fmt::format(
      "{} clean cases{} of seed {}, {} comparisons at level perturbed, {} false alarms, {} "
      "vacuous\n",
      cases_, stream_ == CaseStream::kUsual ? "" : " (thorough)", seed_, comparisons(),
      false_alarms_.size(), vacuous_.size());
  text +=
      "\n| dtype | measure | number | median | 90 % | 99 % | 99.9 % | maximum "
      "|\n|---|---|---|---|---|---|---|---|\n";
  for (const auto& [dtype, spread] : spreads_) {
    text += quantile_row(name_of(dtype), "relative error / allowed", spread.relative);
    text += quantile_row(name_of(dtype), "scale error / allowed", spread.scale);
    text += quantile_row(name_of(dtype), "scale error / allowed relative error, even tensors",
                         spread.along);
    text += quantile_row(name_of(dtype), "error / allowed, insensitive", spread.insensitive);
    text += quantile_row(name_of(dtype), "scale sensitivity", spread.sensitivity);
    text += quantile_row(name_of(dtype), "pooled scale error / allowed", spread.pooled_scale);
    text += quantile_row(name_of(dtype), "pooled shift / allowed", spread.pooled_shift);
    text += quantile_row(name_of(dtype), "published bound used", spread.published);
  }
  text += "\n";
  for (const auto& [dtype, spread] : spreads_) {
    text += fmt::format("{}: {} comparisons, {} without any difference\n", name_of(dtype),
                        spread.comparisons, spread.equal);
  }
  const auto add = [&](std::string_view title, const std::vector<FalseAlarm>& list) {
    for (const FalseAlarm& alarm : list) {
      text += fmt::format("{} {}\n  {}\n  repeat: {}\n", title, alarm.case_slug, alarm.reason,
                          repeat_command(seed_, alarm.index, stream_));
    }
  };
  add("FALSE ALARM", false_alarms_);
  add("VACUOUS", vacuous_);
  return text;
}

std::string repeat_command(std::uint64_t seed, std::int64_t index, CaseStream stream) {
  return fmt::format("build/bin/calibrate{} --seed {} --first {} --count 1",
                     stream == CaseStream::kThorough ? " --cases thorough --reference auto" : "",
                     seed, index);
}

}  // namespace isoshard
