// SPDX-License-Identifier: Apache-2.0
/// `isoshard train`: whole training runs of several subjects from the same weights, their loss
/// curves, and a verdict on each.

#include "app/commands.h"
#include "app/options/attach_options.h"
#include "app/options/job_report.h"
#include "app/options/shared_folders.h"
#include "app/options/train_options.h"
#include "app/print_runs.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/cli/report_printer.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/interrupt.h"
#include "suite/train/train.h"

namespace isoshard {
namespace {

TrainPlan plan_of(const TrainRequest& request) {
  return {.cases = request.cases,
          .reference = request.reference,
          .runs_reference = request.runs_reference,
          .reference_curve = request.reference_curve,
          .fault = request.fault,
          .perturbed_runs = request.perturbed_runs,
          .check_interval = request.check_interval,
          .curves = request.output_dir,
          .notes = request.notes,
          .save_weights = request.inputs.save_weights,
          .save_batch = request.inputs.save_batch,
          .look_further = [&request](const Case& item, int steps) {
            return look_further(request, item, steps);
          }};
}

/// Of all runs that are saved.
std::vector<std::filesystem::path> checkpoint_folders(const TrainRequest& request) {
  std::vector<std::filesystem::path> folders;
  for (const Case& item : request.cases) {
    if (!item.save_path.empty()) folders.emplace_back(item.save_path);
  }
  if (request.runs_reference && !request.reference.save_path.empty())
    folders.emplace_back(request.reference.save_path);
  return folders;
}

int run_train(const ParsedOptions& options) {
  TrainRequest request = train_request_of(options);
  for (std::string& line : fit_to_job(options, request.cases))
    request.notes.push_back(std::move(line));
  if (!reports_here()) {
    request.output_dir.clear();
    request.inputs.save_weights.clear();
    request.inputs.save_batch.clear();
  }
  const KeepResults keep_results;
  require_output_file(request.inputs.save_weights, "--save-init-weights");
  require_output_file(request.inputs.save_batch, "--save-batch");
  const OutputFolder folder(request.output_dir, "--output-dir");
  set_aside_reports(request.output_dir);
  const ReportFile file(options, reports_here());
  const SharedFolders checkpoints(default_launcher(), checkpoint_folders(request),
                                  "--save-checkpoint");
  TextOptions text = terminal_options();
  text.log_interval = request.log_interval;
  ReportPrinter printer(static_cast<int>(request.cases.size()) + (request.runs_reference ? 1 : 0),
                        text);
  for (const std::string& line : request.notes) printer.note(line);
  PrintRuns output(printer,
                   request.cases.empty() ? request.reference.steps : request.cases.front().steps);
  Report report = train(plan_of(request), output);
  agree_on_report(default_launcher(), report, [&](const ReportCase& item) { printer.add(item); });
  report.provenance = provenance_of(options);
  printer.finish(report);
  write_report(request.output_dir, report, text);
  file.write(report, text);
  return report.exit_code;
}

}  // namespace

Command train_command() {
  return {"train",
          "train whole runs from the same weights, write their loss curves, and judge each against "
          "a single process",
          "train [options]",
          "  isoshard train --subjects reference,ddp,autotp --tp 2 --dp 2 --steps 100 --output-dir "
          "curves\n"
          "  isoshard plot --input-dir curves --output curves/loss_curves.svg\n"
          "  isoshard train --optimizer sgd --dtype bf16                          every subject, "
          "small model, 100 steps\n"
          "  isoshard train --model_name Qwen/Qwen2.5-0.5B --num_layers 2 --batch_size 2 "
          "--seq_length 128 --learning_rate 1e-5 \\\n"
          "      --debug_steps 100 --subjects ddp --loss_output_dir curves --init_weights_path "
          "w.safetensors --save_init_weights\n"
          "  isoshard train --subjects autotp --tp 2 --dp 2 --steps 50 --save-checkpoint saved\n"
          "  isoshard train --subjects fsdp_tp --tp 2 --dp 3 --steps 100 --resume saved/autotp\n"
          "  isoshard train --subjects autotp --reference curves/loss_reference.json --output-dir "
          "curves",
          declare_train_options,
          run_train,
          /*judges=*/true};
}

}  // namespace isoshard
