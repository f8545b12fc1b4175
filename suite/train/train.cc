// SPDX-License-Identifier: Apache-2.0
/// One run after the other, and what each leaves in the report.
#include "suite/train/train.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/reference_name.h"
#include "fixtures/cases/device_settings.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/inputs/inputs.h"
#include "fixtures/weights/shared_weights.h"
#include "harness/report/summary.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/host_pause.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "subjects/registry/subject_spec.h"
#include "suite/faults/fault.h"
#include "suite/record/job_rounding.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/warm_up_training.h"

namespace isoshard {
namespace {

constexpr const char* kReferenceRuns = "reference and perturbed runs";

/// The runs of one plan.
class Training {
 public:
  Training(const TrainPlan& plan, TrainObserver& observer) : plan_(plan), observer_(observer) {
    report_.notes = plan.notes;
    report_.environment = settings_in_environment();
    report_.environment.merge(device_environment({plan.reference}));
    report_.environment.merge(collectives_environment(plan.cases));
    report_.has_statistics = true;
  }

  void read_or_train_reference() {
    if (!plan_.reference_curve.empty()) {
      read_reference();
    } else if (plan_.runs_reference) {
      train_reference_runs();
    }
  }

  void run(const Case& item) {
    observer_.on_start(item.subject);
    ReportCurve result{.name = item.slug(),
                       .copy_of = std::string(subject_spec(item.subject).copy_of),
                       .fault = plan_.fault};
    try {
      const TrainedCase trained = trained_case(item);
      keep(trained.curve);
      result.verdict = verdict_on(trained);
      if (result.verdict.has_value()) {
        result.verdict->label = label_of_copy(trained.curve, result.copy_of);
        if (!result.verdict->published.empty())
          result.remarks.push_back(
              "          " + limits_in_words(result.verdict->published, are_held(trained.curve)));
        add_look_further(item, trained, result);
      }
      if (item.resumed.has_value() && plan_.runs_reference && !why_not_one_run(item).empty())
        result.remarks.push_back("          " + on_resumption());
      result.curve = trained.curve;
    } catch (const std::exception& error) {
      const int code = exit_code_of(error);
      if (plan_.cases.size() == 1 && (code == kExitUsage || code == kExitBadInput)) throw;
      set_failure(result, error);
    }
    observer_.on_curve(report_.add(std::move(result)));
    note(host_pause_in_words(take_host_pauses(), item.slug()));
    note_unequal_runs();
  }

  Report finish() {
    report_.summary = summary_of(report_, "run");
    if (interrupt_signal() != 0) {
      report_.exit_code = 128 + interrupt_signal();
      report_.summary = "interrupted: " + report_.summary;
    }
    return std::move(report_);
  }

 private:
  void read_reference() {
    reference_ = read_curve(plan_.reference_curve);
    if (reference_->subject != kReferenceName)
      throw FileError(fmt::format("{} must be the curve of a reference, got the curve of {}",
                                  plan_.reference_curve.string(), reference_->subject));
    for (const Case& item : plan_.cases)
      refuse_different_settings(*reference_, untrained_curve(item));
  }

  /// A reference that ends in numbers that are none, or whose perturbed runs are too far from it,
  /// shows nothing.
  void train_reference_runs() {
    observer_.on_start(kReferenceRuns);
    const TrainedCase trained =
        train_reference(plan_.reference, plan_.perturbed_runs, options_of(kReferenceRuns));
    keep(trained.curve);
    reference_ = trained.curve;
    const std::string problem = non_finite_in_words(trained),
                      chaos = chaos_of(trained.curve, CurveBounds());
    ReportCurve result{.name = plan_.reference.slug(), .curve = trained.curve};
    if (!problem.empty() || !chaos.empty()) {
      const char* const between = problem.empty() || chaos.empty() ? "" : "\n          ";
      result.verdict = verdict_of(Status::kVacuous, trained.curve, problem + between + chaos);
    } else if (plan_.cases.empty()) {
      result.remarks.emplace_back("The reference alone was trained: nothing is judged.");
    }
    if (std::string words = on_resumption(); !words.empty())
      result.remarks.push_back(std::move(words));
    observer_.on_curve(report_.add(std::move(result)));
    note_unequal_runs();
  }

  void note(std::string line) {
    if (line.empty()) return;
    observer_.on_note(line);
    report_.notes.push_back(std::move(line));
  }
  void note_unequal_runs() {
    for (std::string& line : unequal_runs_of_hosts(default_launcher())) note(std::move(line));
  }

  /// "copy of DeepSpeed AutoTP (TP=2, DP=2)": what was judged is not the system that it copies.
  static std::string label_of_copy(Curve curve, const std::string& copy_of) {
    if (!copy_of.empty()) curve.title = "copy of " + copy_of;
    return label_of(curve);
  }

  /// Whether the reference of runs that go on from a checkpoint was interrupted, too.
  std::string on_resumption() const {
    if (!plan_.reference.resumed.has_value()) return "";
    const std::string why = why_not_one_run(plan_.reference);
    if (why.empty())
      return fmt::format(
          "The reference was not interrupted: it trained from step 0, and is compared from step {} "
          "on.",
          plan_.reference.first_step());
    return fmt::format(
        "WARNING: the reference goes on from the checkpoint, too, so what both load wrongly is not "
        "seen: {}",
        why);
  }

  static CurveVerdict verdict_of(Status status, const Curve& curve, std::string reason) {
    CurveVerdict verdict;
    verdict.status = status;
    verdict.label = label_of(curve);
    verdict.reason = std::move(reason);
    verdict.steps = static_cast<int>(curve.steps.size());
    return verdict;
  }

  TrainOptions options_of(const std::string& run) {
    TrainOptions options;
    options.check_interval = plan_.check_interval;
    if (observer_.watches_steps())
      options.on_step = [this, run](int step) { observer_.on_step(run, step); };
    return options;
  }

  TrainedCase trained_case(const Case& item) {
    TrainOptions options = options_of(item.subject);
    if (plan_.fault.empty()) return train_case(item, options);
    const FaultProbe probe;
    options.run = with_fault(options.run, find_fault(plan_.fault), item, probe);
    TrainedCase trained = train_case(item, options);
    require_fired(probe, plan_.fault, item.slug());
    return trained;
  }

  void keep(const Curve& curve) const {
    if (!plan_.curves.empty()) write_curve(plan_.curves / curve_file_name(curve), curve);
  }

  /// Without a reference only what a run finds by itself is a verdict.
  std::optional<CurveVerdict> verdict_on(const TrainedCase& trained) const {
    if (reference_.has_value()) return judge_training(*reference_, trained);
    if (trained.is_sound()) return std::nullopt;
    return verdict_of(Status::kDiverges, trained.curve, found_without_reference(trained));
  }

  void add_look_further(const Case& item, const TrainedCase& trained, ReportCurve& result) const {
    const CurveVerdict& verdict = *result.verdict;
    if (!plan_.look_further || !reference_.has_value() || item.resumed.has_value() ||
        verdict.status != Status::kDiverges)
      return;
    int first = trained.curve.steps.back().step;
    if (verdict.first.has_value()) first = std::min(first, verdict.first->step);
    if (trained.unequal_copies.has_value())
      first = std::min(first, trained.unequal_copies->key.step);
    result.remarks.push_back(
        fmt::format("          look further: {}", plan_.look_further(item, first + 1)));
  }

  const TrainPlan& plan_;
  TrainObserver& observer_;
  std::optional<Curve> reference_;
  Report report_;
};

}  // namespace

Report train(const TrainPlan& plan, TrainObserver& observer) {
  sweep_scratch_folders();
  if (!plan.save_weights.empty()) save_initial_weights(plan.reference, plan.save_weights);
  if (!plan.save_batch.empty()) save_case_batches(plan.reference, plan.save_batch);
  warm_up_training({plan.reference});
  std::vector<Case> all = plan.cases;
  all.push_back(plan.reference);
  const SharedWeights weights(all);
  require_unchanged_inputs();
  Training training(plan, observer);
  training.read_or_train_reference();
  for (const Case& item : plan.cases) {
    if (interrupt_signal() != 0) break;
    training.run(item);
  }
  return training.finish();
}

}  // namespace isoshard
