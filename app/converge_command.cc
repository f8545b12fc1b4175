// SPDX-License-Identifier: Apache-2.0
/// `isoshard converge`: control and test sets of a convergence test, by torchtitan's guideline.
#include "app/commands.h"
#include "app/options/attach_options.h"
#include "app/options/converge_options.h"
#include "app/options/job_report.h"
#include "app/print_runs.h"
#include "fixtures/inputs/inputs.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/cli/report_printer.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"
#include "harness/report/summary.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/interrupt.h"
#include "suite/converge/converge_report.h"

namespace isoshard {
namespace {

int run_converge(const ParsedOptions& options) {
  ConvergeRequest request = converge_request_of(options);
  ConvergePlan& plan = request.plan;
  fit_to_job(options, plan);
  if (!reports_here()) {
    plan.folder.clear();
    request.inputs.save_weights.clear();
    request.inputs.save_batch.clear();
  }
  const KeepResults keep_results;
  require_output_file(request.inputs.save_weights, "--save-init-weights");
  require_output_file(request.inputs.save_batch, "--save-batch");
  const OutputFolder folder(plan.folder, "--output-dir");
  set_aside_reports(plan.folder);
  set_aside_convergence(plan);
  const ReportFile file(options, reports_here());
  if (!request.inputs.save_weights.empty())
    save_initial_weights(plan.control, request.inputs.save_weights);
  if (!request.inputs.save_batch.empty())
    save_case_batches(plan.control, request.inputs.save_batch);
  ReportPrinter printer(static_cast<int>(1 + plan.seeds.size() * (1 + plan.sets.size())),
                        terminal_options());
  for (const std::string& line : plan.notes) printer.note(line);
  PrintRuns output(printer, plan.control.steps);
  ConvergeResult result = converge(plan, output);
  result.report.summary = summary_of(result.report, "run");
  agree_on_report(default_launcher(), result.report,
                  [&](const ReportCase& item) { printer.add(item); });
  result.report.provenance = provenance_of(options);
  if (!is_quiet()) {
    printer.progress().clear();
    print("\n{}\n", convergence_text(plan, result));
  }
  printer.finish(result.report);
  write_convergence(plan, result);
  write_report(plan.folder, result.report, terminal_options());
  file.write(result.report, terminal_options());
  return result.report.exit_code;
}

}  // namespace

Command converge_command() {
  return {
      "converge",
      "test whether parallelisms and techniques converge as 1D FSDP does, by torchtitan's "
      "guideline",
      "converge [options]",
      "  isoshard converge                                          the table of the guideline, "
      "N = 2, M = 8\n"
      "  isoshard converge --preset interleaved --output-dir curves\n"
      "  isoshard converge --test tp=2,pp=2,cp=2 --test tp=2,vocab-parallel,recompute --steps "
      "50\n"
      "  isoshard converge --test cp=2,context-attention=ring --seeds 0,1,2\n"
      "  isoshard converge --config llama3_8b.toml --test tp=2\n"
      "  isoshard converge --test cp=2 --fault cp_divisor_missing   must diverge\n"
      "  mpirun -n 16 isoshard converge --attach --test tp=2,pp=2,cp=2",
      declare_converge_options,
      run_converge,
      /*judges=*/true};
}

}  // namespace isoshard
