// SPDX-License-Identifier: Apache-2.0
/// The parts of a report in words.
#include "harness/report/text/text_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "harness/curve/curve_statistics.h"
#include "harness/report/card/card.h"
#include "harness/report/json/json_report.h"
#include "harness/report/summary.h"
#include "harness/report/text/hanging.h"
#include "harness/verdict/exit_code.h"

namespace isoshard {
namespace {

std::string steps_text(const Curve& curve, int log_interval) {
  std::string text;
  if (log_interval == 0) return text;
  for (const CurveStep& step : curve.steps) {
    if (step.step % log_interval == 0)
      text += fmt::format("{} step {}: loss {:.6f}, grad_norm {:.6f}, lr {:g}\n", curve.subject,
                          step.step, step.loss, step.grad_norm, step.learning_rate);
  }
  return text;
}

std::string failure_text(const std::string& name, const std::string& failure,
                         const Rule& rule = {}) {
  return fmt::format("INCOMPLETE  {}: {}{}\n", name, failure, in_brackets(rule));
}

std::string detection_text(const ReportCase& item, const ReportDetection& detection) {
  if (const auto& row = detection.row; row.has_value()) {
    const auto word = [](bool is_right) { return is_right ? "yes" : "NO"; };
    std::string text =
        fmt::format("{:<36} {:<5}  {:<5}  {:<12}  {:<5}  {:>5.2f} s\n", item.fault, row->dtype,
                    word(row->alarm), word(row->place), word(row->cause), row->seconds);
    if (!detection.problem.empty()) text += fmt::format("    {}\n", detection.problem);
    return text;
  }
  const std::string place = fmt::format("{} on {}", item.fault, item.name);
  if (!detection.is_right) return fmt::format("MISSED  {}: {}\n", place, detection.problem);
  return fmt::format("{}  {}: {}\n",
                     item.verdict->status == Status::kConforms ? "NO ALARM" : "FOUND", place,
                     item.verdict->reason);
}

std::string statistics_text(const std::vector<ReportCurve>& curves) {
  std::vector<Curve> ended;
  for (const ReportCurve& item : curves) {
    if (item.failure.empty()) ended.push_back(item.curve);
  }
  return ended.empty() ? "" : statistics_table(ended);
}

/// Of a curve that conforms.
std::string short_line(const CurveVerdict& verdict) {
  const std::string used =
      verdict.strength == Strength::kExact
          ? ""
          : fmt::format(", at most {:.2g} of what is allowed", verdict.largest_share);
  return fmt::format("CONFORMS ({})  {}: {} steps{}\n", name_of(verdict.strength), verdict.label,
                     verdict.steps, used);
}

std::string unmet_text(const ReportCase& item) {
  return fmt::format("NOT ENOUGH  {}: {}\n", item.name, item.unmet);
}

/// A run that a signal ended is not what its command line says.
bool can_be_repeated(const Report& report) {
  return report.exit_code != kExitConforms && report.exit_code < kExitHangup &&
         !report.provenance.command.empty();
}

bool is_exercised(const ReportFeature& feature) {
  return feature.cases > 0;
}

/// One line; empty if all are exercised.
std::string missed_features(const std::vector<ReportFeature>& features) {
  constexpr std::size_t kMostNames = 6;
  std::vector<std::string> missed;
  for (const ReportFeature& feature : features)
    if (!is_exercised(feature)) missed.push_back(fmt::format("{} {}", feature.group, feature.name));
  if (missed.empty()) return "";
  const std::size_t count = missed.size();
  missed.resize(std::min(count, kMostNames));
  return fmt::format(
      "Not tested: {} of {} features, which no case uses: {}{} (verify --coverage lists them; "
      "--preset thorough uses all)\n",
      count, features.size(), fmt::join(missed, ", "), count > kMostNames ? ", ..." : "");
}

}  // namespace

std::string features_text(const std::vector<ReportFeature>& features) {
  std::size_t groups = 0;
  for (const ReportFeature& feature : features) groups = std::max(groups, feature.group.size());
  const auto head = [&](const ReportFeature& feature) {
    return fmt::format("  {:<{}}  ", feature.group, groups);
  };
  const auto count = std::ranges::count_if(features, is_exercised);
  std::string text = fmt::format("{} of {} features are exercised:\n", count, features.size());
  for (const ReportFeature& feature : features) {
    if (is_exercised(feature))
      text += hanging(head(feature),
                      fmt::format("{}: {} case{}, the first {}", feature.name, feature.cases,
                                  feature.cases == 1 ? "" : "s", feature.first));
  }
  if (count == std::ssize(features)) return text;
  text += hanging("", fmt::format("{} are not; beside `verify --preset small` these flags exercise "
                                  "them, and --preset thorough all:",
                                  std::ssize(features) - count));
  for (const ReportFeature& feature : features) {
    if (!is_exercised(feature))
      text += hanging(head(feature), fmt::format("{}: {}", feature.name, feature.flags));
  }
  return text;
}

std::string TextReport::block(std::string text) {
  if (text.empty()) return text;
  if (!is_empty_) text.insert(0, 1, '\n');
  is_empty_ = false;
  ends_with_block_ = true;
  return text;
}

std::string TextReport::lines(std::string text) {
  if (text.empty()) return text;
  if (ends_with_block_) text.insert(0, 1, '\n');
  is_empty_ = ends_with_block_ = false;
  return text;
}

std::string TextReport::fit(const std::string& text) const {
  constexpr std::string_view kCommand = "look further: ";  // is pasted into a shell as it is
  const std::size_t columns = options_.verdict.columns;
  if (columns == 0) return text;
  std::string result;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    const std::string line = text.substr(begin, end - begin);
    result += line.find(kCommand) == line.npos ? wrapped(line, columns) : line;
    begin = end;
  }
  return result;
}

std::string TextReport::note(const std::string& line) {
  return is_summary() ? "" : lines(fit(line + "\n"));
}

std::string TextReport::add(const ReportCase& item) {
  if (is_summary()) return "";
  if (!item.verdict.has_value())
    return block(fit(failure_text(item.name, item.failure, item.rule)));
  if (item.detection.has_value()) return lines(fit(detection_text(item, *item.detection)));
  return is_brief() ? brief(item) : full(item);
}

std::string TextReport::brief(const ReportCase& item) {
  const Verdict& verdict = *item.verdict;
  std::string line = short_verdict_line(verdict);
  if (item.against == "emulated" && verdict.status != Status::kConforms)
    line += "; the reference is its declared arithmetic, the tolerance is zero";
  std::string text = painted(fit(line), verdict.status, options_.verdict.color) + "\n";
  if (!item.unmet.empty()) text += fit(unmet_text(item));
  return item.exit_code() == kExitConforms ? lines(std::move(text))
                                           : block(std::move(text) + card(item));
}

std::string TextReport::full(const ReportCase& item) {
  std::string text = render(*item.verdict, options_.verdict);
  if (item.against == "emulated")
    text.insert(0,
                "Against the emulated reference (the declared arithmetic in one process); the "
                "tolerance is zero:\n");
  if (!item.unmet.empty()) text += unmet_text(item);
  return block(fit(text) + card(item));
}

std::string TextReport::card(const ReportCase& item) const {
  if (!item.verdict.has_value() || item.verdict->findings.empty()) return "";
  return card_text(card_of(case_json(item), "cases"), options_.verdict);
}

std::string TextReport::add(const ReportCurve& item) {
  if (is_summary()) return "";
  if (!item.failure.empty()) return lines(fit(failure_text(item.name, item.failure)));
  std::string text = steps_text(item.curve, options_.log_interval);
  if (is_brief() && item.verdict.has_value() && item.verdict->status == Status::kConforms)
    return lines(fit(text + short_line(*item.verdict)));
  if (item.verdict.has_value()) text += render(*item.verdict);
  for (const std::string& remark : item.remarks) text += remark + "\n";
  return lines(fit(text));
}

std::string TextReport::add(const ReportGolden& item) {
  return is_summary() ? "" : lines(fit(item.text));
}

std::string TextReport::add(const ReportExperiment& item) {
  return is_summary() ? "" : block(item.text);
}

std::string TextReport::add(const ReportBenchmark& item) {
  return is_summary() ? "" : lines(item.text);
}

std::string TextReport::repeat(const std::vector<std::string>& command) {
  std::string text = repeat_text(command, options_.verdict);
  // the last row of a card, where one was printed last
  if (!is_empty_ && !ends_with_block_) text.insert(0, 1, '\n');
  is_empty_ = false;
  ends_with_block_ = true;
  return text;
}

std::string TextReport::finish(const Report& report, std::optional<double> seconds) {
  std::string text;
  if (!is_summary()) {
    if (can_be_repeated(report)) text += repeat(report.provenance.command);
    const std::size_t columns = options_.verdict.columns;
    if (!is_brief() || options_.shows_tables) {
      for (const ComparisonTables& tables : report.tables)
        text += block(fit(render_tables(tables, options_.verdict.all_tensors,
                                        columns == 0 ? kLineWidth : columns)));
    }
    if (report.has_statistics && !is_brief()) text += block(statistics_text(report.curves));
    if (!report.features.empty() && !is_brief())
      text += lines(fit(missed_features(report.features)));
  }
  if (report.summary.empty()) return text;
  std::string line = report.summary;
  if (seconds.has_value()) line += fmt::format(" in {}", seconds_in_words(*seconds));
  return text + lines(fit(line + "\n"));
}

std::string text_of(const Report& report, const TextOptions& options) {
  TextReport writer(options);
  std::string text;
  for (const std::string& line : report.notes) text += writer.note(line);
  for (const ReportCase& item : report.cases) text += writer.add(item);
  for (const ReportCurve& item : report.curves) text += writer.add(item);
  for (const ReportGolden& item : report.goldens) text += writer.add(item);
  for (const ReportExperiment& item : report.experiments) text += writer.add(item);
  for (const ReportBenchmark& item : report.benchmarks) text += writer.add(item);
  return text + writer.finish(report);
}

}  // namespace isoshard
