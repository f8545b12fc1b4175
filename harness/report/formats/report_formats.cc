// SPDX-License-Identifier: Apache-2.0
/// The list of formats.
#include "harness/report/formats/report_formats.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/html/html_report.h"
#include "harness/report/json/json_report.h"
#include "harness/report/junit/junit_report.h"

namespace isoshard {
namespace {

std::string write_json(const Report& report, const TextOptions&) {
  return report_json(report).dump(1) + "\n";
}

std::string write_html(const Report& report, const TextOptions&) {
  return html_of(report_json(report));
}

std::string write_junit(const Report& report, const TextOptions&) {
  return junit_of(report);
}

/// A file has no colors and no columns, whatever the terminal has, and leaves nothing out.
std::string write_text(const Report& report, const TextOptions& options) {
  TextOptions plain = options;
  plain.verdict.color = false;
  plain.verdict.columns = 0;
  plain.detail = Detail::kFull;
  return text_of(report, plain);
}

constexpr std::array kFormats{
    ReportFormat{"json", "report.json", true, write_json},
    ReportFormat{"text", "report.txt", true, write_text},
    ReportFormat{"junit", "junit.xml", true, write_junit},
    ReportFormat{"html", "report.html", false, write_html},
};

}  // namespace

std::span<const ReportFormat> report_formats() {
  return kFormats;
}

const ReportFormat& find_report_format(std::string_view name) {
  std::vector<std::string> known;
  for (const ReportFormat& format : kFormats) {
    if (format.name == name) return format;
    known.emplace_back(format.name);
  }
  throw UsageError(fmt::format("unknown report format '{}'{}; it must be one of {}", name,
                               did_you_mean(std::string(name), known), join_names(known)));
}

const ReportFormat& report_format_of(const std::filesystem::path& file) {
  const std::string ending = file.extension().string();
  std::string known;
  for (const ReportFormat& format : kFormats) {
    const std::string own = std::filesystem::path(format.file_name).extension().string();
    if (own == ending) return format;
    known += (known.empty() ? "" : ", ") + own;
  }
  throw UsageError(fmt::format("a report must end in one of {}, got '{}'", known, file.string()));
}

void write_report(const std::filesystem::path& folder, const Report& report,
                  const TextOptions& options) {
  if (folder.empty()) return;
  for (const ReportFormat& format : kFormats) {
    if (format.is_usual)
      write_file_atomically(folder / format.file_name, format.write(report, options));
  }
  for (const ReportFormat& format : kFormats) {
    if (format.is_usual) remove_old(folder / format.file_name);
  }
}

}  // namespace isoshard
