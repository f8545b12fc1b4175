// SPDX-License-Identifier: Apache-2.0
/// `isoshard bench`: how fast an implementation trains, once it is shown to train rightly.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "app/bench_actions.h"
#include "app/commands.h"
#include "app/options/attach_options.h"
#include "app/options/bench_options.h"
#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/progress.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_printer.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/machine.h"
#include "suite/bench/bench_json.h"
#include "suite/bench/bench_text.h"
#include "suite/reference/device/device_collectives.h"

namespace isoshard {
namespace {

/// Prints what happens while a plan is carried out.
class BenchPrinter {
 public:
  BenchPrinter(const BenchPlan& plan, Progress& progress, BenchOutput& output)
      : plan_(plan), progress_(progress), output_(output) {}
  [[nodiscard]] BenchListener listener() {
    return {.on_start = [this](const std::string& what) { progress_.show(what); },
            .on_gate = [this](const GateResult& gate) { show(gate_lines(gate)); },
            .on_step =
                progress_.is_shown()
                    ? [this](int step) { progress_.show(fmt::format("step {}", step + 1), false); }
                    : std::function<void(int)>()};
  }
  void show(const Lines& lines) {
    progress_.clear();
    output_.show(lines, plan_.is_gated);
  }

 private:
  const BenchPlan& plan_;
  Progress& progress_;
  BenchOutput& output_;
};

int run_one(const ParsedOptions& options) {
  const BenchPlan plan = bench_plan_of(options);
  refuse_without_memory(plan);
  const std::filesystem::path file = plan.output_dir / results_file_name(plan);
  if (reports_here()) require_output_file(file, "--output-dir");
  const OutputFolder folder(reports_here() ? plan.output_dir : "", "--output-dir");
  BenchOutput output(options);
  Progress progress(1 + plan.repeat);
  BenchPrinter printer(plan, progress, output);
  printer.show(plan_lines(plan));
  printer.show(mesh_lines(plan.item));
  if (plan.item.device != Device::Kind::kCpu)
    printer.show({"device cuda; ranks meet by " + device_collectives(plan.item).words});
  const BenchResult result = bench(plan, printer.listener());
  const std::string name = plan.item.slug();
  if (result.gate.state == GateState::kFails) return output.finish_at_gate(name, result.gate);
  printer.show(result_lines(result));
  const std::string json = bench_json(result).dump(1) + "\n";
  if (reports_here()) write_file_atomically(file, json);
  printer.show({fmt::format("wrote {}", file.string())});
  if (is_quiet()) output.conclude(speed_lines(result), plan.is_gated);
  return output.finish(name, "measured", kExitConforms, json);
}

int run_bench_command(const ParsedOptions& options) {
  const std::string action =
      options.given("action") ? options.get<std::string>("action") : std::string("run");
  if (ranks_of_job(options) > 0 && action != "run") {
    throw UsageError(fmt::format(
        "bench {} has no --attach: it needs fresh processes for each configuration, which it "
        "forks; start one process of it, without mpirun",
        action));
  }
  if (action == "run") return run_one(options);
  if (action == "compare") return bench_compare(options);
  const std::vector<std::string> known = {"run", "compare"};
  throw UsageError(fmt::format("unknown action '{}'{}; known are {}", action,
                               did_you_mean(action, known), join_names(known)));
}

}  // namespace

BenchOutput::BenchOutput(const ParsedOptions& options)
    : options_(options), file_(options, reports_here()) {}

void BenchOutput::show(const Lines& lines, bool is_gated) {
  const std::string text = text_of(lines, is_gated);
  if (!is_quiet()) print(text);
  text_ += text;
}

void BenchOutput::conclude(const std::string& text) {
  print(text);
  text_ += text;
}

int BenchOutput::finish(const std::string& name, const std::string& status, int code,
                        const std::string& json) const {
  Report report;
  report.add(ReportBenchmark{name, status, text_, json}, code);
  report.environment = settings_in_environment();
  report.provenance = provenance_of(options_);
  file_.write(report, {});
  return code;
}

int BenchOutput::finish_at_gate(const std::string& name, const GateResult& gate) {
  Report report = gate.report;
  report.provenance = provenance_of(options_);
  ReportPrinter printer(1);
  for (const ReportCase& item : report.cases) printer.add(item);
  printer.finish(report);
  text_ += text_of(report);
  return finish(name, "does not conform", gate.exit_code);
}

Command bench_command() {
  return {
      "bench",
      "time an implementation, after a small twin of it was judged",
      "bench [run | compare A B] [options]",
      "  isoshard bench --impl autotp --model small --dp_size 2 --tp_size 2 --seq_length 128 "
      "--num_training_steps 20\n"
      "  isoshard bench --impl fsdp_dtensor --model small --dp_size 2 --tp_size 2 "
      "--seq_length 128 --num_training_steps 20\n"
      "  mpirun -n 4 isoshard bench --attach --impl autotp --model small --dp_size 2 --seq_length "
      "128\n",
      declare_bench_options,
      run_bench_command,
      /*judges=*/true};
}

}  // namespace isoshard
