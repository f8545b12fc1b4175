// SPDX-License-Identifier: Apache-2.0
/// The option --report: one file of what a command found.
#pragma once
#include <filesystem>
#include <memory>

#include "harness/cli/options.h"
#include "harness/cli/output_folder.h"
#include "harness/report/formats/report_formats.h"

namespace isoshard {

/// Adds --report to the group "output".
void declare_report_file(OptionTable& table);

/// The file that --report names, in the format of its ending.
///
/// Guarantees   made before any rank starts, it proves that the file can be written, and sets aside
///              that of an earlier run (harness/report/formats/earlier_reports.h).
/// Errors       UsageError for another ending; as OutputFolder and require_output_file.
class ReportFile {
 public:
  /// `writes`: whether this process is the one that writes.
  explicit ReportFile(const ParsedOptions& options, bool writes = true);
  /// Nothing without --report.   Errors   as write_file_atomically.
  void write(const Report& report, const TextOptions& options) const;

 private:
  std::filesystem::path path_;
  const ReportFormat* format_ = nullptr;
  std::unique_ptr<OutputFolder> folder_;
};

}  // namespace isoshard
