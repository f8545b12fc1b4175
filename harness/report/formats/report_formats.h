// SPDX-License-Identifier: Apache-2.0
/// The formats that a report can be written in. A new format is a writer (two files below
/// harness/report) and a row of report_formats.cc.
#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "harness/report/report.h"
#include "harness/report/text/text_report.h"

namespace isoshard {

struct ReportFormat {
  std::string_view name;       ///< "json"
  std::string_view file_name;  ///< "report.json"
  bool is_usual = true;        ///< whether it is written unless another choice is made
  /// The whole file.
  std::string (*write)(const Report& report, const TextOptions& options);
};

[[nodiscard]] std::span<const ReportFormat> report_formats();

/// Errors   UsageError with a suggestion and the names.
[[nodiscard]] const ReportFormat& find_report_format(std::string_view name);

/// The format whose files end as `file` does.
/// Errors   UsageError with the endings.
[[nodiscard]] const ReportFormat& report_format_of(const std::filesystem::path& file);

/// Writes the report to `folder` in each usual format, and removes what set_aside_reports has kept
/// of an earlier one; nothing if `folder` is empty.
/// Errors   as write_file_atomically.
void write_report(const std::filesystem::path& folder, const Report& report,
                  const TextOptions& options = {});

}  // namespace isoshard
