// SPDX-License-Identifier: Apache-2.0
/// `isoshard faults`: injects faults of the catalog and says whether each is found.
#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "app/commands.h"
#include "app/options/attach_options.h"
#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/progress.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/cli/report_printer.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"
#include "harness/world/interrupt.h"
#include "suite/faults/fault.h"
#include "suite/study/study.h"
#include "suite/study/study_tables.h"
#include "suite/verify/detect_faults.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
namespace fs = std::filesystem;
using Ids = std::vector<std::string>;

class PrintDetections : public VerifyObserver {
 public:
  explicit PrintDetections(ReportPrinter& printer) : printer_(printer) {}

  void on_case(const Case& item) override { printer_.progress().show(item.slug()); }
  void on_judged(const ReportCase& item) override { printer_.add(item); }

 private:
  ReportPrinter& printer_;
};

void declare_faults(OptionTable& table) {
  auto add = table.group("faults");
  add("fault", po::value<Ids>()->multitoken()->composing(),
      "ids of the catalog (isoshard list faults), as arguments, too; default: all that are built. "
      "After the word run: each in fp32 and bf16, as a table; the word study: random bugs that no "
      "catalog lists, judged by isoshard and by weaker checks");
  add("class", po::value<std::string>(),
      "only the faults of these classes, such as AB (isoshard list faults names them)");
  add("benign", po::bool_switch(), "the benign variations instead: each must conform");
  auto study = table.group("study");
  study("seed", po::value<std::uint64_t>()->default_value(1), "seed of the stream of random bugs");
  study("first", po::value<std::int64_t>()->default_value(0), "number of the first bug");
  study("count", po::value<std::int64_t>()->default_value(200), "number of bugs");
  study("curve-steps", po::value<int>()->default_value(100),
        "steps of the training runs whose curves are compared");
  study("noise-only", po::bool_switch(),
        "the null set: noise alone, which has a place and no cause; isoshard judges it within "
        "tolerances, and weaker checks are left out");
  auto output = table.group("output");
  output("output-dir", po::value<std::string>(),
         "write report.json, report.txt and junit.xml to this folder; of a study, which goes on "
         "from what is there, study.csv, study.md and sensitivity.svg");
  declare_report_file(table);
  table.positional.add("fault", -1);
}

/// `faults run ...`: all dtypes, as a table.
bool is_run(const ParsedOptions& options) {
  return options.given("fault") && options.get<Ids>("fault").front() == "run";
}

Ids ids_of(const ParsedOptions& options) {
  const bool is_benign = options.get<bool>("benign");
  if (is_run(options)) {
    if (is_benign)
      throw UsageError("--benign must be left out with run, which runs the faults of the catalog");
    Ids ids = options.get<Ids>("fault");
    ids.erase(ids.begin());
    if (!ids.empty() && options.given("class"))
      throw UsageError("--class and ids both choose faults; leave one of them out");
    if (!ids.empty()) return ids;
  } else if (options.given("fault")) {
    if (is_benign || options.given("class"))
      throw UsageError("--class, --benign and ids each choose faults; give only one of them");
    return options.get<Ids>("fault");
  }
  const std::string classes = options.given("class") ? options.get<std::string>("class") : "";
  if (is_benign && !classes.empty())
    throw UsageError("--class must be left out with --benign: variations have no class");
  for (const char letter : classes) (void)title_of_class(letter);
  Ids ids;
  for (const Fault& fault : is_benign ? benign_variations() : fault_catalogue())
    if (classes.empty() || classes.find(fault.fault_class) != classes.npos) ids.push_back(fault.id);
  if (ids.empty()) throw UsageError("nothing selected: no fault is of class " + classes);
  return ids;
}

bool is_study(const ParsedOptions& options) {
  return options.given("fault") && options.get<Ids>("fault").front() == "study";
}

void refuse_study_options(const ParsedOptions& options) {
  for (const char* const name : {"seed", "first", "count", "curve-steps", "noise-only"}) {
    const auto origin = options.origins.find(name);
    if (options.given(name) && origin != options.origins.end() && origin->second == "command line")
      throw UsageError(
          fmt::format("--{} is an option of 'isoshard faults study'; leave it out", name));
  }
}

/// Each row is in the file as soon as it is known, so a study that is ended goes on from there.
int run_faults_study(const ParsedOptions& options) {
  if (options.get<Ids>("fault").size() > 1 || options.given("class") ||
      options.get<bool>("benign") || options.given("report"))
    throw UsageError("study chooses its own bugs; leave out ids, --class, --benign and --report");
  if (!options.given("output-dir"))
    throw UsageError(
        "study needs --output-dir DIR, where it writes each result as soon as it is known");
  const StudyPlan plan{.seed = options.get<std::uint64_t>("seed"),
                       .first = options.get<std::int64_t>("first"),
                       .count = options.get<std::int64_t>("count"),
                       .curve_steps = options.get<int>("curve-steps"),
                       .is_noise = options.get<bool>("noise-only")};
  const fs::path folder = options.get<std::string>("output-dir"), file = folder / "study.csv";
  const OutputFolder lock(folder, "--output-dir");
  std::vector<StudyRow> rows = read_study(file, plan);
  std::string text = study_head(plan);
  for (const StudyRow& row : rows) text += to_line(row);
  write_file_atomically(file, text);  // without a line that a killed run has cut off
  std::ofstream stream(file, std::ios::app | std::ios::binary);
  Progress progress(static_cast<int>(plan.count + std::ssize(plan.cases)));
  run_study(plan, rows, [&](const StudyRow& row) {
    stream << to_line(row) << std::flush;
    if (!stream) throw InfrastructureError(fmt::format("{}: cannot be written", file.string()));
    progress.show(row.composition.empty() ? row.case_slug : row.composition);
    rows.push_back(row);
  });
  progress.clear();
  const std::string tables = plan.is_noise ? noise_table(rows) : study_tables(rows);
  write_file_atomically(folder / "study.md", tables);
  if (!plan.is_noise)
    write_file_atomically(folder / "sensitivity.svg",
                          share_figure(sensitivity_panels(rows), "magnitude of the change"));
  print("{}", tables);
  const StudyFailures failures = failures_of(rows);
  print(
      "isoshard alarms {} runs without a bug, misses {} bugs that its records show, and gives "
      "{} noises a cause\n",
      failures.false_alarms, failures.missed, failures.caused_noise);
  if (interrupt_signal() != 0) return 128 + interrupt_signal();
  return failures.any() ? kExitDiverges : kExitConforms;
}

int run_faults(const ParsedOptions& options) {
  refuse_several_processes("faults");
  if (is_study(options)) return run_faults_study(options);
  refuse_study_options(options);
  const Ids ids = ids_of(options);
  for (const std::string& id : ids) (void)find_fault(id);
  const std::string folder =
      options.given("output-dir") ? options.get<std::string>("output-dir") : std::string();
  const KeepResults keep_results;
  const OutputFolder lock(folder, "--output-dir");
  set_aside_reports(folder);
  const ReportFile file(options);
  const TextOptions text = terminal_options();
  ReportPrinter printer(static_cast<int>(ids.size()), text);
  PrintDetections output(printer);
  if (is_run(options)) print(head_of_faults_table());
  Report report = is_run(options) ? inject_catalog(ids, output) : detect_faults(ids, output);
  report.provenance = provenance_of(options);
  printer.finish(report);
  write_report(folder, report, text);
  file.write(report, text);
  return report.exit_code;
}

}  // namespace

Command faults_command() {
  return {
      "faults",
      "inject real bugs of the catalog, one after the other: each must be found",
      "faults [run | study] [ID...] [options]",
      "  isoshard faults                                            all that are built; takes "
      "minutes\n"
      "  isoshard faults run                                        the same in fp32 and in bf16, "
      "as a table with times\n"
      "  isoshard faults study --count 300 --output-dir study       random bugs: what isoshard "
      "and weaker checks see\n"
      "  isoshard faults dp_sum_missing mlp_input_grad_partial --report faults.html\n"
      "  isoshard faults --benign                                   legal differences: no "
      "alarm",
      declare_faults,
      run_faults,
      /*judges=*/true};
}

}  // namespace isoshard
