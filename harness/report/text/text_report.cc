// SPDX-License-Identifier: Apache-2.0
/// The parts of a report in words.
#include "harness/report/text/text_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "harness/curve/curve_statistics.h"
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

std::string failure_text(const std::string& name, const std::string& failure) {
  return fmt::format("INCOMPLETE  {}: {}\n", name, failure);
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
      "{} of {} features were not exercised, so their bugs would not be found: {}{} (verify "
      "--coverage lists them; --preset thorough has all)\n",
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
  if (ends_with_block_) return block(std::move(text));
  is_empty_ = false;
  return text;
}

std::string TextReport::note(const std::string& line) {
  return options_.is_quiet ? "" : lines(line + "\n");
}

std::string TextReport::add(const ReportCase& item) {
  if (!item.verdict.has_value()) return block(failure_text(item.name, item.failure));
  if (options_.is_quiet && item.exit_code() == kExitConforms) return "";
  if (item.detection.has_value()) return lines(detection_text(item, *item.detection));
  if (options_.is_brief && item.exit_code() == kExitConforms)
    return lines(verdict_line(*item.verdict) + "\n");
  std::string text = render(*item.verdict, options_.verdict);
  if (item.against == "emulated")
    text.insert(0,
                "Against the emulated reference (the declared arithmetic in one process); the "
                "tolerance is zero:\n");
  if (!item.unmet.empty()) text += fmt::format("NOT ENOUGH  {}: {}\n", item.name, item.unmet);
  return block(std::move(text));
}

std::string TextReport::add(const ReportCurve& item) {
  if (!item.failure.empty()) return lines(failure_text(item.name, item.failure));
  if (options_.is_quiet && item.exit_code() == kExitConforms) return "";
  std::string text = steps_text(item.curve, options_.log_interval);
  if (item.verdict.has_value()) text += render(*item.verdict);
  for (const std::string& remark : item.remarks) text += remark + "\n";
  return lines(std::move(text));
}

std::string TextReport::add(const ReportGolden& item) {
  static const std::set<std::string> kAsWanted = {"match", "accepted", "removed", "reviewed"};
  return options_.is_quiet && kAsWanted.contains(item.status) ? "" : lines(item.text);
}

std::string TextReport::add(const ReportExperiment& item) {
  return options_.is_quiet && item.holds ? "" : block(item.text);
}

std::string TextReport::add(const ReportBenchmark& item) {
  return lines(item.text);
}

std::string TextReport::finish(const Report& report) {
  std::string text;
  if (options_.is_quiet) return report.summary.empty() ? "" : lines(report.summary + "\n");
  for (const ComparisonTables& tables : report.tables)
    text += block(render_tables(tables, options_.verdict.all_tensors));
  if (report.has_statistics) text += block(statistics_text(report.curves));
  if (!report.features.empty()) text += lines(missed_features(report.features));
  if (!report.summary.empty()) text += lines(report.summary + "\n");
  return text;
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
