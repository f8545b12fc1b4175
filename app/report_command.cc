// SPDX-License-Identifier: Apache-2.0
// isoshard report: a page from a stored report.json.
#include <boost/program_options/value_semantic.hpp>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "app/commands.h"
#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/html/html_report.h"
#include "harness/verdict/exit_code.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
namespace fs = std::filesystem;

/// A report of hundreds of cases with hundreds of tensors each.
constexpr JsonLimits kLimits{.max_bytes = std::size_t{256} << 20,
                             .max_values = std::size_t{1} << 24};

void declare_report(OptionTable& table) {
  auto add = table.group("report");
  add("input", po::value<std::string>(),
      "a report.json, or a folder that has one (--output-dir of another command)");
  add("output", po::value<std::string>(), "the page (default: report.html beside report.json)");
  table.positional.add("input", 1);
}

int run_report(const ParsedOptions& options) {
  if (!options.given("input"))
    throw UsageError("nothing selected: name a folder with a report.json, or the file");
  const fs::path input = stored_report(options.get<std::string>("input"));
  const fs::path output = options.given("output") ? fs::path(options.get<std::string>("output"))
                                                  : fs::path(input).replace_extension(".html");
  if (output.extension() != ".html")
    throw UsageError("--output must end in .html, got " + output.string());
  require_output_file(output, "--output");
  const nlohmann::json report = read_json_file(input, kLimits);
  const OutputFolder folder(output.has_parent_path() ? output.parent_path() : fs::path("."),
                            "--output");
  try {
    write_file_atomically(output, html_of(report));
  } catch (const nlohmann::json::exception& error) {
    throw FileError(input.string() + ": must be a report of isoshard: " + error.what());
  }
  print("{}\n", output.string());
  return kExitConforms;
}

}  // namespace

Command report_command() {
  return {"report",
          "make a page to read from a stored report",
          "report DIR [--output FILE.html]",
          "  isoshard verify --preset small --output-dir out\n"
          "  isoshard report out                                        writes out/report.html",
          declare_report,
          run_report};
}

}  // namespace isoshard
