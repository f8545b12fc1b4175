// SPDX-License-Identifier: Apache-2.0
/// `isoshard train`: whole training runs of several subjects from the same weights, their loss
/// curves, and a verdict on each.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "app/commands.h"
#include "app/options/train_options.h"
#include "core/base/error.h"
#include "fixtures/inputs/inputs.h"
#include "fixtures/weights/shared_weights.h"
#include "harness/cli/exit_code.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/progress.h"
#include "harness/curve/curve_statistics.h"
#include "harness/world/interrupt.h"
#include "suite/faults/fault.h"
#include "suite/reference/warm_up_training.h"
#include "suite/train/judge_training.h"

namespace isoshard {
namespace {

void print(const std::string& text) {
  fmt::print("{}", text);
  if (std::fflush(stdout) != 0)
    throw InfrastructureError("cannot write the report to standard output; is its disk full?");
}

/// The runs of one command.
class Training {
 public:
  explicit Training(const TrainRequest& request)
      : request_(request),
        progress_(static_cast<int>(request.cases.size()) + (request.runs_reference ? 1 : 0)) {}

  void make_reference(const Case& any) {
    if (!request_.reference_curve.empty()) {
      reference_ = read_curve(request_.reference_curve);
      if (reference_->subject != "reference")
        throw FileError(fmt::format("{}: is the curve of {}, not of a reference",
                                    request_.reference_curve.string(), reference_->subject));
      for (const Case& item : request_.cases)
        refuse_different_settings(*reference_, untrained_curve(item));
      return;
    }
    if (!request_.runs_reference) return;
    progress_.show("reference and perturbed runs");
    const TrainedCase trained =
        train_reference(any, request_.perturbed_runs, options_of("reference and perturbed runs"));
    keep(trained.curve);
    reference_ = trained.curve;
    const std::string problem = non_finite_in_words(trained),
                      chaos = chaos_of(trained.curve, CurveBounds());
    if (problem.empty() && chaos.empty()) {
      if (request_.cases.empty()) print("The reference alone was trained: nothing is judged.\n");
      return;
    }
    print(fmt::format("VACUOUS   {}: {}{}{}\n", label_of(trained.curve), problem,
                      problem.empty() || chaos.empty() ? "" : "\n          ", chaos));
    code_ = combine_exit_codes(code_, kExitDiverges);
  }

  void run(const Case& item) {
    progress_.show(item.subject);
    TrainOptions options = options_of(item.subject);
    const FaultProbe probe;
    if (!request_.fault.empty())
      options.run = with_fault(options.run, find_fault(request_.fault), item, probe);
    const TrainedCase trained = train_case(item, options);
    if (!request_.fault.empty() && probe.count() == 0)
      throw InfrastructureError(
          fmt::format("fault {} never fired in {}: the case does not use what it breaks",
                      request_.fault, item.slug()));
    keep(trained.curve);
    report(item, trained);
  }

  void finish() {
    progress_.clear();
    if (curves_.empty()) return;
    print("\n" + statistics_table(curves_));
  }

  void fail(const Case& item, const InfrastructureError& error) {
    progress_.clear();
    print(fmt::format("INCOMPLETE  {}: {}\n", item.slug(), error.what()));
    code_ = combine_exit_codes(code_, kExitInfrastructure);
  }

  [[nodiscard]] int exit_code() const noexcept { return code_; }

 private:
  TrainOptions options_of(const std::string& what) {
    TrainOptions options;
    options.check_interval = request_.check_interval;
    if (!progress_.is_shown()) return options;
    options.on_step = [this, what](int step) {
      progress_.show(fmt::format("{}: step {}", what, step + 1), false);
    };
    return options;
  }

  void keep(const Curve& curve) {
    progress_.clear();
    curves_.push_back(curve);
    if (!request_.output_dir.empty())
      write_curve(request_.output_dir / curve_file_name(curve), curve);
    if (request_.log_interval == 0) return;
    for (const CurveStep& step : curve.steps) {
      if (step.step % request_.log_interval == 0)
        print(fmt::format("{} step {}: loss {:.6f}, grad_norm {:.6f}, lr {:g}\n", curve.subject,
                          step.step, step.loss, step.grad_norm, step.learning_rate));
    }
  }

  void report(const Case& item, const TrainedCase& trained) {
    if (!reference_.has_value()) {
      if (trained.is_sound()) return;
      print(fmt::format("DIVERGES  {}: {}\n", label_of(trained.curve),
                        found_without_reference(trained)));
      code_ = combine_exit_codes(code_, kExitDiverges);
      return;
    }
    const CurveVerdict verdict = judge_training(*reference_, trained);
    print(render(verdict));
    if (verdict.status == Status::kDiverges && !item.resumed.has_value()) {
      int first = trained.curve.steps.back().step;
      if (verdict.first.has_value()) first = std::min(first, verdict.first->step);
      if (trained.unequal_copies.has_value())
        first = std::min(first, trained.unequal_copies->key.step);
      print(fmt::format("          look further: {}\n", look_further(request_, item, first + 1)));
    }
    code_ = combine_exit_codes(code_, exit_code_of(verdict.status));
  }

  const TrainRequest& request_;
  Progress progress_;
  std::optional<Curve> reference_;
  std::vector<Curve> curves_;
  int code_ = kExitConforms;
};

int run_train(const ParsedOptions& options) {
  const TrainRequest request = train_request_of(options);
  const KeepResults keep_results;
  const OutputFolder output(request.output_dir, "--output-dir");
  for (const std::string& note : request.notes) print(note + "\n");
  if (!request.inputs.save_weights.empty())
    save_initial_weights(request.reference, request.inputs.save_weights);
  if (!request.inputs.save_batch.empty())
    save_case_batches(request.reference, request.inputs.save_batch);
  warm_up_training({request.reference});
  std::vector<Case> all = request.cases;
  all.push_back(request.reference);
  const SharedWeights weights(all);
  Training training(request);
  training.make_reference(request.reference);
  for (const Case& item : request.cases) {
    if (interrupt_signal() != 0) break;
    try {
      training.run(item);
    } catch (const InfrastructureError& error) {
      training.fail(item, error);
    }
  }
  training.finish();
  return interrupt_signal() != 0 ? 128 + interrupt_signal() : training.exit_code();
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
          run_train};
}

}  // namespace isoshard
