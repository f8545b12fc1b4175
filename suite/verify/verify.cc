// SPDX-License-Identifier: Apache-2.0
/// One case after the other, and what each leaves in the report.
#include "suite/verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/reference_name.h"
#include "fixtures/cases/case_settings.h"
#include "fixtures/cases/device_settings.h"
#include "fixtures/cases/features.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/cases/setting.h"
#include "fixtures/inputs/inputs.h"
#include "fixtures/weights/shared_weights.h"
#include "harness/bundle/bundle.h"
#include "harness/report/summary.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/host_pause.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "subjects/parallel/nd/schedule/schedule_simulation.h"
#include "subjects/parallel/nd/stages.h"
#include "suite/faults/fault.h"
#include "suite/record/expected_calls.h"
#include "suite/record/job_rounding.h"
#include "suite/record/run_case.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/warm_up_training.h"
#include "suite/verify/verify_case.h"

namespace isoshard {
namespace {

/// What a bundle says of the single process that these cases are judged against.
std::string reference_settings(const Case& item, std::span<const Case> judged) {
  const Case reference = reference_case(item);
  JudgePolicy policy = policy_of(reference);
  // of the runs that are judged against it
  policy.activation_grad_scale = policy_of(item).activation_grad_scale;
  return with_calls_of(bundle_settings(reference, policy), judged);
}

/// Writes every run as a bundle, and passes on what it hears.
class BundleDump : public VerifyObserver {
 public:
  BundleDump(const VerifyPlan& plan, VerifyObserver& next)
      : folder_(plan.dump),
        writes_(plan.writes),
        cases_(is_benign_variation(plan.fault) ? std::vector<Case>() : plan.cases),
        next_(next) {}

  void on_plain(const Case& item, const Reference& reference) override {
    if (writes_)
      write_bundle(folder_ / ("reference_" + item.reference_slug()), reference,
                   reference_settings(item, judged_against(item.reference_slug())));
    next_.on_plain(item, reference);
  }
  void on_emulated(const Case& item, const Reference& reference) override {
    if (writes_)
      write_bundle(folder_ / ("emulated_" + item.slug()), reference,
                   reference_settings(item, cases_.empty() ? std::span<const Case>()
                                                           : std::span<const Case>(&item, 1)));
    next_.on_emulated(item, reference);
  }
  void on_run(const Case& item, const Trace& trace) override {
    if (writes_) write_bundle(folder_ / item.slug(), trace, bundle_settings(item, policy_of(item)));
    next_.on_run(item, trace);
  }

 private:
  [[nodiscard]] std::vector<Case> judged_against(const std::string& reference) const {
    std::vector<Case> judged;
    std::ranges::copy_if(cases_, std::back_inserter(judged),
                         [&](const Case& c) { return c.reference_slug() == reference; });
    return judged;
  }

  std::filesystem::path folder_;
  bool writes_;
  std::vector<Case> cases_;  ///< whose calls are those of their tables
  VerifyObserver& next_;
};

JudgePlan judge_plan_of(const VerifyPlan& plan, bool rounds_alike) {
  JudgePlan result;
  // A benign variation is legal, but not what its subject declares.
  const bool is_benign = !plan.fault.empty() && !find_fault(plan.fault).expected.has_value();
  // One process emulates all ranks: what those on another CPU compute has other bits.
  const bool has_other_bits = is_benign || !rounds_alike;
  result.reference = plan.reference == ReferenceKind::kAuto && has_other_bits
                         ? ReferenceKind::kPlain
                         : plan.reference;
  result.fault = plan.fault;
  result.tables = plan.tables;
  result.times = true;
  result.repeat = plan.repeat;
  result.retention = plan.dump.empty() ? Retention::kLean : Retention::kWhole;
  return result;
}

/// All cases start from the same weights; the one that takes most samples has those of the others.
void save_inputs(const VerifyPlan& plan) {
  if (!plan.save_weights.empty()) save_initial_weights(plan.cases.front(), plan.save_weights);
  if (plan.save_batch.empty()) return;
  const auto samples = [](const Case& c) {
    return std::int64_t{c.steps} * c.micro_batches * c.degrees.dp * c.batch_size;
  };
  const auto largest =
      std::max_element(plan.cases.begin(), plan.cases.end(),
                       [&](const Case& a, const Case& b) { return samples(a) < samples(b); });
  save_case_batches(*largest, plan.save_batch);
}

/// As its pipeline would run with equal stages and a backward that takes twice a forward.
std::vector<ReportAction> schedule_of(const Case& item) {
  if (item.degrees.pp < 2) return {};
  const PipelineSpec spec = pipeline_spec(item.settings.nd, item.degrees.pp, item.micro_batches);
  std::vector<ReportAction> actions;
  for (const SimulatedAction& done : simulate(make_schedule(spec), ActionCosts()).ran) {
    std::string label = to_string(done.action);
    if (spec.stages_per_rank == 1) label.erase(0, label.find_first_not_of("0123456789"));
    actions.push_back({done.rank, done.start, done.end, std::move(label)});
  }
  return actions;
}

/// Whatever one case throws is told as its failure: the others keep their verdicts. What is wrong
/// with the only case of a command, or its files, ends the command as any wrong option does.
ReportCase judged_case(CaseJudge& judge, const Case& item, const VerifyPlan& plan) {
  const bool is_only = plan.cases.size() == 1;
  ReportCase result{.name = item.slug(), .fault = plan.fault, .schedule = schedule_of(item)};
  try {
    CaseJudgement judgement = judge.judge_case(item);
    result.verdict = std::move(judgement.verdict);
    result.against = name_of(judgement.against);
    result.collective_times = std::move(judgement.collective_times);
    require_strength(result, plan.require);
  } catch (const std::exception& error) {
    const int code = exit_code_of(error);
    if (is_only && (code == kExitUsage || code == kExitBadInput)) throw;
    set_failure(result, error);
  }
  return result;
}

/// A run that an interrupt ended was not judged.
std::string closing_line(const Report& report, std::size_t total, std::size_t judged) {
  if (interrupt_signal() != 0)
    return fmt::format("interrupted after {} of {} cases", judged, total);
  const std::size_t left = total - report.cases.size();
  const std::string not_run = left == 0 ? "" : fmt::format("; {} did not run (--fail-fast)", left);
  return summary_of(report, total) + not_run;
}

}  // namespace

std::vector<ReportFeature> features_of(const std::vector<Case>& cases) {
  std::vector<ReportFeature> result;
  for (FeatureCount& count : count_features(cases))
    result.push_back({std::string(count.feature->group), std::string(count.feature->name),
                      count.cases, std::move(count.first), std::string(count.feature->flags)});
  return result;
}

Report verify(const VerifyPlan& plan, VerifyObserver& observer) {
  if (plan.cases.empty()) throw UsageError("nothing selected: there is no case to verify");
  sweep_scratch_folders();
  if (plan.writes) save_inputs(plan);
  warm_up_training(plan.cases);
  const SharedWeights weights(plan.cases);
  require_unchanged_inputs();
  BundleDump dump(plan, observer);
  const std::string rounding = difference_in_rounding(default_launcher());
  CaseJudge judge(judge_plan_of(plan, rounding.empty()), plan.dump.empty() ? observer : dump);
  // A run with a fault differs: its references are asked for again.
  if (plan.fault.empty()) judge.announce(plan.cases);
  Report report;
  report.notes = plan.notes;
  if (plan.fault.empty()) report.features = features_of(plan.cases);
  if (!rounding.empty()) {
    observer.on_note(rounding);
    report.notes.push_back(rounding);
  }
  report.environment = settings_in_environment();
  report.environment.merge(device_environment(plan.cases));
  report.environment.merge(collectives_environment(plan.cases));
  std::size_t judged = 0;
  for (const Case& item : plan.cases) {
    if (interrupt_signal() != 0) break;
    observer.on_case(item);
    (void)take_host_pauses();
    const ReportCase& added = report.add(judged_case(judge, item, plan));
    observer.on_judged(added);
    std::vector<std::string> lines = unequal_runs_of_hosts(default_launcher());
    if (std::string slow = host_pause_in_words(take_host_pauses(), item.slug()); !slow.empty())
      lines.push_back(std::move(slow));
    for (std::string& line : lines) {
      observer.on_note(line);
      report.notes.push_back(std::move(line));
    }
    judged += added.verdict.has_value() || interrupt_signal() == 0 ? 1 : 0;
    if (plan.fail_fast && added.exit_code() != kExitConforms) break;
  }
  if (interrupt_signal() != 0) report.exit_code = 128 + interrupt_signal();
  try {
    report.tables = judge.tables();
  } catch (const std::exception& error) {  // the verdicts stand
    report.notes.push_back(fmt::format("the runs cannot be put side by side: {}", error.what()));
    report.exit_code = combine_exit_codes(report.exit_code, exit_code_of(error));
  }
  report.summary = closing_line(report, plan.cases.size(), judged);
  return report;
}

}  // namespace isoshard
