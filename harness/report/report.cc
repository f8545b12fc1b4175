// SPDX-License-Identifier: Apache-2.0
/// Which exit code a report has.
#include "harness/report/report.h"

#include <fmt/format.h>

#include <new>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/suggest.h"

namespace isoshard {

Status ReportCase::status() const noexcept {
  return verdict.has_value() ? verdict->status : Status::kIncomplete;
}

int ReportCase::exit_code() const noexcept {
  if (!verdict.has_value()) return failure_code;
  if (detection.has_value()) return detection->is_right ? kExitConforms : kExitDiverges;
  return unmet.empty() ? exit_code_of(verdict->status) : kExitDiverges;
}

Strength parse_required_strength(const std::string& word) {
  if (word == "any") return Strength::kNone;
  if (word == name_of(Strength::kExact)) return Strength::kExact;
  const std::vector<std::string> known = {"any", "exact"};
  throw UsageError(fmt::format("--require must be one of {}, got '{}'{}", join_names(known), word,
                               did_you_mean(word, known)));
}

void require_strength(ReportCase& item, Strength wanted) {
  if (item.status() != Status::kConforms || item.verdict->strength >= wanted) return;
  item.unmet = fmt::format("the verdict must be {}, got {}", name_of(wanted),
                           name_of(item.verdict->strength));
}

int ReportCurve::exit_code() const noexcept {
  if (!failure.empty()) return failure_code;
  return verdict.has_value() ? exit_code_of(verdict->status) : kExitConforms;
}

namespace {

template <class Item>
void set_failure_of(Item& item, const std::exception& error) {
  item.failure = error.what();
  item.failure_code = exit_code_of(error);
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
    item.failure = "memory ran out (std::bad_alloc); take fewer tokens, layers or parameters";
  if (const std::string changed = MappedFile::problem_of_any(); !changed.empty()) {
    item.failure = changed;
    item.failure_code = kExitBadInput;
  }
  if (item.failure.empty()) item.failure = "an exception without words";
}

}  // namespace

void set_failure(ReportCase& item, const std::exception& error) {
  item.verdict.reset();
  const Rule* const rule = rule_of(error);
  item.rule = rule == nullptr ? Rule() : *rule;
  set_failure_of(item, error);
}

void set_failure(ReportCurve& item, const std::exception& error) {
  item.verdict.reset();
  set_failure_of(item, error);
}

ReportCase& Report::add(ReportCase item) {
  exit_code = combine_exit_codes(exit_code, item.exit_code());
  return cases.emplace_back(std::move(item));
}

ReportCurve& Report::add(ReportCurve item) {
  exit_code = combine_exit_codes(exit_code, item.exit_code());
  return curves.emplace_back(std::move(item));
}

ReportExperiment& Report::add(ReportExperiment item) {
  exit_code = combine_exit_codes(exit_code, item.holds ? kExitConforms : kExitDiverges);
  return experiments.emplace_back(std::move(item));
}

ReportGolden& Report::add(ReportGolden item, int code) {
  exit_code = combine_exit_codes(exit_code, code);
  return goldens.emplace_back(std::move(item));
}

ReportBenchmark& Report::add(ReportBenchmark item, int code) {
  exit_code = combine_exit_codes(exit_code, code);
  return benchmarks.emplace_back(std::move(item));
}

}  // namespace isoshard
