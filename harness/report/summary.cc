// SPDX-License-Identifier: Apache-2.0
// Parts are counted by what became of them.
#include "harness/report/summary.h"

#include <fmt/format.h>

#include <array>
#include <vector>

namespace isoshard {
namespace {

/// What became of a part of a report.
struct Outcome {
  std::string name;
  Status status = Status::kIncomplete;
  Strength strength = Strength::kNone;
  bool is_too_weak = false;
};

std::vector<Outcome> outcomes_of(const Report& report) {
  std::vector<Outcome> outcomes;
  for (const ReportCase& item : report.cases) {
    Outcome outcome{.name = item.name, .status = item.status()};
    if (item.verdict.has_value()) {
      outcome.name = fmt::format("{} {}", item.verdict->subject, item.verdict->case_slug);
      outcome.strength = item.verdict->strength;
      outcome.is_too_weak = !item.unmet.empty();
    }
    outcomes.push_back(std::move(outcome));
  }
  for (const ReportCurve& item : report.curves) {
    if (item.failure.empty() && !item.verdict.has_value()) continue;
    Outcome outcome{.name = item.name};
    if (item.verdict.has_value()) {
      outcome.status = item.verdict->status;
      outcome.strength = item.verdict->strength;
    }
    outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

/// How strong the verdicts are; one word if all are alike.
std::string strengths_in_words(std::size_t exact, std::size_t within) {
  if (exact + within == 0) return "";
  if (within == 0) return fmt::format(" ({})", name_of(Strength::kExact));
  if (exact == 0) return fmt::format(" ({})", name_of(Strength::kWithinTolerance));
  return fmt::format(" ({} {}, {} {})", exact, name_of(Strength::kExact), within,
                     name_of(Strength::kWithinTolerance));
}

/// ", 2 diverge (autotp qwen2_tp2 and 1 more)"; empty for none.
std::string others_in_words(const std::vector<Outcome>& outcomes, Status status,
                            std::string_view one, std::string_view several) {
  std::size_t count = 0;
  std::string first;
  for (const Outcome& outcome : outcomes) {
    if (outcome.status != status) continue;
    if (count++ == 0) first = outcome.name;
  }
  if (count == 0) return "";
  return fmt::format(", {} {} ({}{})", count, count == 1 ? one : several, first,
                     count == 1 ? "" : fmt::format(" and {} more", count - 1));
}

}  // namespace

std::string summary_of(const Report& report, std::size_t total, std::string_view one) {
  const std::vector<Outcome> outcomes = outcomes_of(report);
  std::size_t exact = 0, within = 0, too_weak = 0;
  for (const Outcome& outcome : outcomes) {
    if (outcome.status != Status::kConforms) continue;
    (outcome.strength == Strength::kExact ? exact : within) += 1;
    too_weak += outcome.is_too_weak ? 1 : 0;
  }
  std::string text =
      fmt::format("{} of {} {}{} conform{}{}", exact + within, total, one, total == 1 ? "" : "s",
                  total == 1 ? "s" : "", strengths_in_words(exact, within));
  if (too_weak > 0) text += fmt::format(", {} of them more weakly than required", too_weak);
  text += others_in_words(outcomes, Status::kDiverges, "diverges", "diverge") +
          others_in_words(outcomes, Status::kVacuous, "is vacuous", "are vacuous") +
          others_in_words(outcomes, Status::kIncomplete, "is incomplete", "are incomplete");
  return text;
}

std::string summary_of(const Report& report, std::string_view one) {
  return summary_of(report, outcomes_of(report).size(), one);
}

std::string seconds_in_words(double seconds) {
  constexpr double kTenths = 9.95, kMinutes = 600;
  if (seconds < 1) return fmt::format("{:.2f} s", seconds);
  if (seconds < kTenths) return fmt::format("{:.1f} s", seconds);
  if (seconds < kMinutes) return fmt::format("{:.0f} s", seconds);
  return fmt::format("{:.0f} min", seconds / 60);
}

}  // namespace isoshard
