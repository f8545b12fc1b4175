// SPDX-License-Identifier: Apache-2.0
/// The parts of a report in words.
#include "harness/report/text/text_report.h"

#include <fmt/format.h>

#include <set>

#include "harness/curve/curve_statistics.h"
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

}  // namespace

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

std::string TextReport::finish(const Report& report) {
  std::string text;
  if (options_.is_quiet) return report.summary.empty() ? "" : lines(report.summary + "\n");
  for (const ComparisonTables& tables : report.tables)
    text += block(render_tables(tables, options_.verdict.all_tensors));
  if (report.has_statistics) text += block(statistics_text(report.curves));
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
  return text + writer.finish(report);
}

}  // namespace isoshard
