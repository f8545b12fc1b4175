// SPDX-License-Identifier: Apache-2.0
/// `isoshard verify`: runs every selected case against its reference and prints what was found.
#include <fmt/format.h>

#include <algorithm>

#include "app/commands.h"
#include "app/options/attach_options.h"
#include "app/options/failed_cases.h"
#include "app/options/job_report.h"
#include "app/options/verify_options.h"
#include "core/base/error.h"
#include "harness/cli/man_page.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/cli/report_printer.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"
#include "harness/report/text/text_report.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/interrupt.h"
#include "suite/verify/verify.h"

namespace isoshard {
namespace {

/// Shows which case runs, and prints each verdict as soon as it is there.
class PrintVerdicts : public VerifyObserver {
 public:
  explicit PrintVerdicts(ReportPrinter& printer) : printer_(printer) {}

  void on_case(const Case& item) override { printer_.progress().show(item.slug()); }
  void on_judged(const ReportCase& item) override { printer_.add(item); }
  void on_note(const std::string& line) override { printer_.note(line); }

 private:
  ReportPrinter& printer_;
};

VerifyPlan plan_of(const VerifyRequest& request) {
  return {.cases = request.cases,
          .reference = request.reference,
          .fault = request.fault,
          .tables = request.tables,
          .fail_fast = request.fail_fast,
          .repeat = request.repeat,
          .require = request.require,
          .notes = request.notes,
          .writes = reports_here(),
          .dump = request.dump,
          .save_weights = request.inputs.save_weights,
          .save_batch = request.inputs.save_batch};
}

/// Of the earlier run's cases those that were wrong.
void keep_failed(const FailedCases& failed, std::vector<Case>& cases) {
  const auto is_wanted = [&](const Case& item) {
    return std::ranges::find(failed.cases, item.slug()) != failed.cases.end();
  };
  std::erase_if(cases, [&](const Case& item) { return !is_wanted(item); });
  if (cases.size() == failed.cases.size()) return;
  throw UsageError(fmt::format(
      "--failed-from: {} cases were wrong, of which these options make {}; leave out options that "
      "change cases",
      failed.cases.size(), cases.size()));
}

/// One process has nothing to be judged against but itself.
void require_several_ranks(const VerifyRequest& request) {
  for (const Case& item : request.cases) {
    if (item.degrees.num_ranks() > 1 || !request.fault.empty()) continue;
    throw UsageError(fmt::format(
        "{} must run on at least 2 processes, got 1 ({}): it is the reference itself; give --dp 2, "
        "or --tp 2 to a subject with a tp axis",
        item.slug(), describe(item.degrees)));
  }
}

int run_verify(const ParsedOptions& given) {
  FailedCases failed;
  ParsedOptions options = given;
  if (given.given("failed-from")) {
    failed = failed_cases_of(given.get<std::string>("failed-from"));
    options = with_options_of(failed, options_of(verify_command()), given);
  }
  VerifyRequest request = verify_request_of(options);
  if (!failed.cases.empty()) keep_failed(failed, request.cases);
  require_several_ranks(request);
  if (!reports_here()) request.output_dir.clear();
  if (request.coverage) {
    for (const std::string& note : request.notes) print(note + "\n");
    print(features_text(features_of(request.cases)));
    return kExitConforms;
  }
  const KeepResults keep_results;
  require_output_file(request.inputs.save_weights, "--save-init-weights");
  require_output_file(request.inputs.save_batch, "--save-batch");
  const OutputFolder reports(request.output_dir, "--output-dir"),
      dump(reports_here() ? request.dump : "", "--dump");
  set_aside_reports(request.output_dir);
  const ReportFile file(options, reports_here());
  TextOptions text = terminal_options();
  text.shows_tables = request.wants_tables;
  ReportPrinter printer(static_cast<int>(request.cases.size()), text);
  for (const std::string& line : request.notes) printer.note(line);
  PrintVerdicts output(printer);
  Report report = verify(plan_of(request), output);
  for (ComparisonTables& tables : report.tables) tables.shows_local = request.local_tables;
  agree_on_report(default_launcher(), report, [&](const ReportCase& item) { printer.add(item); });
  report.provenance = provenance_of(options);
  printer.finish(report);
  write_report(request.output_dir, report, text);
  file.write(report, text);
  return report.exit_code;
}

}  // namespace

Command verify_command() {
  return {
      "verify",
      "judge parallel training steps against a single process, tensor by tensor",
      "verify [options]",
      "  isoshard verify                                            Qwen2.5-0.5B cut to 2 "
      "layers: ddp and autotp on 2 and 4 processes\n"
      "  isoshard verify --preset small --tp 2 --dp 2 --subjects autotp --dtype fp32\n"
      "  isoshard verify --model DIR --tp 2 --dp 2                  a Hugging Face folder with "
      "its weights\n"
      "  isoshard verify --preset small --data ids.bin --shuffle --tail drop       nanoGPT's "
      "or Megatron's flat ids, in a seeded order\n"
      "  isoshard verify --preset small --tp 3 --dp 2 --subjects autotp --reduction-order ring "
      "--reference plain\n"
      "                                                             within tolerances only, "
      "not bit by bit\n"
      "  isoshard verify --preset small --repeat 5                  five runs of each, with "
      "random delays: a race is not repeatable\n"
      "  isoshard verify --preset thorough                          every subject and feature, on "
      "tiny models, in less than a minute\n"
      "  isoshard verify --preset small --coverage                  what these cases exercise, "
      "and what not\n"
      "  isoshard verify --failed-from out                          what was wrong, again\n"
      "  isoshard verify --fault mlp_input_grad_partial             what a real bug looks like "
      "(exits 1)",
      declare_verify_options,
      run_verify,
      /*judges=*/true};
}

}  // namespace isoshard
