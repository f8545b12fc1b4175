// SPDX-License-Identifier: Apache-2.0
// One plan, run by run.
#include "harness/verify/verify_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "core/base/reference_name.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/run_settings.h"
#include "harness/fault/random_delays.h"
#include "harness/judge/judge.h"
#include "harness/report/summary.h"
#include "harness/run/run_subject.h"
#include "harness/verify/run_tables.h"
#include "harness/verify/subject_runs.h"
#include "harness/world/interrupt.h"
#include "harness/world/process_name.h"

namespace isoshard {
namespace {

void check(const RunPlan& plan) {
  if (plan.runs.empty()) throw UsageError("a plan must have at least 1 run, got 0");
  if (plan.repeat < 1)
    throw UsageError(fmt::format("repeat must be at least 1, got {}", plan.repeat));
  std::set<std::string> names;
  for (const RunSpec& run : plan.runs) {
    if (!names.insert(run.name).second)
      throw UsageError(fmt::format("each run must have a name of its own, got {} twice", run.name));
  }
  if (plan.fault.has_value() && (plan.fault->collective == nullptr) == !plan.fault->tap)
    throw UsageError(
        fmt::format("the fault {} must have a collective fault or a tap", plan.fault->name));
}

JudgePolicy policy_of(const RunPlan& plan, const RunSpec& run) {
  JudgePolicy policy = plan.reference.policy;
  policy.activation_grad_scale = run.policy.activation_grad_scale;
  return policy;
}

std::string settings_of(const RunPlan& plan, const JudgePolicy& policy) {
  nlohmann::json training = nlohmann::json::parse(plan.training, nullptr, false);
  if (!training.is_object())
    throw UsageError(
        fmt::format("the training settings must be a JSON object, got {}", plan.training));
  // runs of one plan belong together, and bundles must say something
  if (training.empty()) training["plan"] = plan.reference.name;
  return nlohmann::json({{"training", training}, {"judging", judging_json(policy)}}).dump();
}

/// How runs are judged against the reference, where all of them scale their gradients alike; else
/// `compare` has to be told.
JudgePolicy policy_of_all(const RunPlan& plan) {
  JudgePolicy policy = plan.reference.policy;
  const std::optional<double> scale = plan.runs.front().policy.activation_grad_scale;
  if (std::ranges::all_of(
          plan.runs, [&](const RunSpec& run) { return run.policy.activation_grad_scale == scale; }))
    policy.activation_grad_scale = scale;
  return policy;
}

Reference reference_of(const RunPlan& plan, Launcher& launcher) {
  RunSpec plain = plan.reference;
  plain.subject = kReferenceName;
  Reference reference = record_reference(plain, launcher);
  int num_responses = 0;
  for (RunSpec perturbed : plan.perturbed) {
    perturbed.policy = plan.reference.policy;
    if (perturbed.process_name.empty())
      perturbed.process_name = process_name("response", ++num_responses);
    add_response(reference, perturbed, launcher);
  }
  if (!plan.dump.empty())
    write_bundle(plan.dump / ("reference_" + plain.name), reference,
                 settings_of(plan, policy_of_all(plan)));
  return reference;
}

RunSpec with_fault(RunSpec run, const RunFault& fault, const FaultProbe& probe) {
  if (fault.collective != nullptr) {
    run.decorate = [inner = run.decorate, fault = fault.collective, probe, mesh = run.mesh](
                       std::unique_ptr<Communicator> comm, int rank) {
      if (inner) comm = inner(std::move(comm), rank);
      return decorate_with_fault(std::move(comm), fault, probe, mesh);
    };
  } else {
    run.mutation = [inner = run.mutation, tap = fault.tap, probe](int rank) -> TapMutation {
      return [own = inner ? inner(rank) : TapMutation(), faulty = counted(tap(rank), probe)](
                 const Site& site, at::Tensor value) {
        at::Tensor before = own ? own(site, std::move(value)) : std::move(value);
        return faulty ? faulty(site, std::move(before)) : before;
      };
    };
  }
  return run;
}

/// The same with ranks that meet at other times, others for each number of a run.
RunSpec delayed(RunSpec run, std::uint64_t seed, int number) {
  run.process_name = process_name(run.subject.empty() ? run.name : run.subject, number);
  run.decorate = with_random_delays(std::move(run.decorate), seed, number);
  return run;
}

/// Makes the run until it was made as often as the plan asks, or was another one.
void repeat_runs(const RunPlan& plan, const RunSpec& run, Launcher& launcher, SubjectRuns& runs) {
  while (runs.num_runs() < plan.repeat && !runs.difference().has_value()) {
    const FaultProbe probe;
    const RunSpec again =
        delayed(plan.fault.has_value() ? with_fault(run, *plan.fault, probe) : run, plan.seed,
                runs.num_runs() + 1);
    runs.add(record(launcher, again, {.reference = nullptr, .keep = Keep::kNothing}));
  }
}

Trace trace_of(const RunPlan& plan, RunSpec run, const Reference& reference, Launcher& launcher) {
  const FaultProbe probe;
  if (plan.fault.has_value()) run = with_fault(std::move(run), *plan.fault, probe);
  Trace trace = record(launcher, run,
                       {.reference = &reference,
                        .keep = plan.dump.empty() ? Keep::kWhatDiffers : Keep::kEverything});
  if (plan.fault.has_value() && sum_over_peers(launcher, probe.count()) == 0) {
    throw InfrastructureError(
        fmt::format("fault {} had no effect on {}: the run never makes the calls that it changes",
                    plan.fault->name, run.name));
  }
  if (!plan.dump.empty()) write_bundle(plan.dump / run.name, trace, settings_of(plan, run.policy));
  return trace;
}

ReportCase judged(const RunPlan& plan, RunSpec run, const Reference& reference,
                  Launcher& launcher) {
  run.policy = policy_of(plan, run);
  ReportCase result;
  result.name = run.name;
  result.against = "plain";
  if (plan.fault.has_value()) result.fault = plan.fault->name;
  try {
    SubjectRuns runs;
    {
      const Trace trace = trace_of(plan, run, reference, launcher);
      result.verdict = judge(reference, trace, run.policy);
      runs.add(trace);
    }
    repeat_runs(plan, run, launcher, runs);
    runs.settle(*result.verdict);
  } catch (const InfrastructureError& error) {
    result.failure = error.what();
  }
  return result;
}

}  // namespace

Report verify_runs(const RunPlan& plan, Launcher& launcher) {
  check(plan);
  const KeepResults keep_results;
  const Reference reference = reference_of(plan, launcher);
  Report report;
  for (const RunSpec& run : plan.runs) {
    if (interrupt_signal() != 0) break;
    report.add(judged(plan, run, reference, launcher));
  }
  if (plan.tables) report.tables.push_back(tables_of(plan.reference.name, report.cases));
  if (interrupt_signal() != 0) {
    report.exit_code = 128 + interrupt_signal();
    report.summary =
        fmt::format("interrupted after {} of {} runs", report.cases.size(), plan.runs.size());
  } else {
    report.summary = summary_of(report, plan.runs.size(), "run");
  }
  return report;
}

}  // namespace isoshard
