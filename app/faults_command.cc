// SPDX-License-Identifier: Apache-2.0
/// `isoshard faults`: injects faults of the catalog and says whether each is found.
#include <boost/program_options/value_semantic.hpp>
#include <string>
#include <vector>

#include "app/commands.h"
#include "app/options/attach_options.h"
#include "app/report_printer.h"
#include "core/base/error.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"
#include "harness/world/interrupt.h"
#include "suite/faults/fault.h"
#include "suite/verify/detect_faults.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
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
      "After the word run: each in fp32 and bf16, as a table");
  add("class", po::value<std::string>(), "the faults of these classes alone, such as AB");
  add("benign", po::bool_switch(), "the benign variations in their place: none may be alarmed");
  auto output = table.group("output");
  output("output-dir", po::value<std::string>(),
         "write report.json, report.txt and junit.xml to this folder");
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
      throw UsageError("--class chooses faults, and so do ids: give one of them");
    if (!ids.empty()) return ids;
  } else if (options.given("fault")) {
    if (is_benign || options.given("class"))
      throw UsageError("--class and --benign choose faults, and so do ids: give one of them");
    return options.get<Ids>("fault");
  }
  const std::string classes = options.given("class") ? options.get<std::string>("class") : "";
  if (is_benign && !classes.empty())
    throw UsageError("--class must be left out with --benign: variations have no class");
  Ids ids;
  for (const Fault& fault : is_benign ? benign_variations() : fault_catalogue())
    if (classes.empty() || classes.find(fault.fault_class) != classes.npos) ids.push_back(fault.id);
  if (ids.empty()) throw UsageError("nothing selected: no fault is of class " + classes);
  return ids;
}

int run_faults(const ParsedOptions& options) {
  refuse_several_processes("faults");
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
      "faults [run] [ID...] [options]",
      "  isoshard faults                                            all that are built; takes "
      "minutes\n"
      "  isoshard faults run                                        the same in fp32 and in bf16, "
      "as a table with times\n"
      "  isoshard faults dp_sum_missing mlp_input_grad_partial --report faults.html\n"
      "  isoshard faults --benign                                   legal differences: no "
      "alarm",
      declare_faults,
      run_faults,
      /*judges=*/true};
}

}  // namespace isoshard
