// SPDX-License-Identifier: Apache-2.0
// The file is in a folder that this process has for itself.
#include "harness/cli/report_file.h"

#include <boost/program_options/value_semantic.hpp>
#include <string>

#include "core/base/atomic_file.h"
#include "harness/report/formats/earlier_reports.h"

namespace isoshard {

void declare_report_file(OptionTable& table) {
  auto output = table.group("output");
  output("report", boost::program_options::value<std::string>(),
         "write one file: FILE.html (a page to read), FILE.json, FILE.txt or FILE.xml (JUnit)");
}

ReportFile::ReportFile(const ParsedOptions& options, bool writes) {
  if (!options.given("report")) return;
  const std::filesystem::path path = options.get<std::string>("report");
  format_ = &report_format_of(path);
  if (!writes) return;
  path_ = path;
  require_output_file(path_, "--report");
  folder_ = std::make_unique<OutputFolder>(
      path_.has_parent_path() ? path_.parent_path() : std::filesystem::path("."), "--report");
  set_aside(path_);
}

void ReportFile::write(const Report& report, const TextOptions& options) const {
  if (path_.empty()) return;
  write_file_atomically(path_, format_->write(report, options));
  remove_old(path_);
}

}  // namespace isoshard
