// SPDX-License-Identifier: Apache-2.0
// Gate, ceiling, runs.
#include "suite/bench/bench.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/machine.h"
#include "subjects/registry/subject_spec.h"
#include "suite/reference/warm_up_training.h"

namespace isoshard {
namespace {

constexpr std::string_view kFsdp = "fsdp_tp", kFsdpImpl = "fsdp_dtensor";

}  // namespace

std::vector<std::string> bench_impls() {
  std::vector<std::string> impls;
  for (const SubjectSpec& spec : subject_specs())
    impls.emplace_back(spec.name == kFsdp ? kFsdpImpl : spec.name);
  return impls;
}

std::string subject_of_impl(std::string_view impl) {
  const std::vector<std::string> impls = bench_impls();
  if (std::ranges::find(impls, impl) != impls.end())
    return std::string(impl == kFsdpImpl ? kFsdp : impl);
  const std::string subject = subject_name(impl);
  if (find_subject(subject) != nullptr) return subject;
  std::vector<std::string> accepted = impls;
  for (const SubjectSpec& spec : subject_specs())
    accepted.insert(accepted.end(), spec.aliases.begin(), spec.aliases.end());
  throw UsageError(fmt::format("unknown impl '{}'{}; known are {}", impl,
                               did_you_mean(impl, accepted), join_names(impls)));
}

int num_processes(const Case& item) {
  return is_reference(item.subject) ? 1 : item.world_size();
}

int usual_threads(const Case& item) {
  int on_a_host = num_processes(item);
  if (const Peers* const peers = default_launcher().peers(); peers != nullptr)
    on_a_host = std::min(on_a_host, std::ranges::max(peers->hosts().num_processes));
  return std::max(1, this_machine().cores / on_a_host);
}

std::string results_file_name(const BenchPlan& plan) {
  const Degrees& degrees = plan.item.degrees;
  std::string name = fmt::format("results_{}_tp{}_dp{}", plan.impl, degrees.tp, degrees.dp);
  if (degrees.pp != 1) name += fmt::format("_pp{}", degrees.pp);
  if (degrees.cp != 1) name += fmt::format("_cp{}", degrees.cp);
  return name + ".json";
}

BenchResult bench(const BenchPlan& plan, const BenchListener& listener) {
  const auto start = [&](const std::string& what) {
    if (listener.on_start) listener.on_start(what);
  };
  BenchResult result{.plan = plan, .gate = {}, .ceiling = {}, .runs = {}};
  warm_up_training({plan.item});
  if (plan.is_gated) {
    start("conformance of a small twin");
    result.gate = pass_gate(plan.item, gate_folder(plan.output_dir));
  }
  if (listener.on_gate) listener.on_gate(result.gate);
  if (result.gate.state == GateState::kFails) return result;
  const Case& item = plan.item;
  for (int run = 0; run < plan.repeat; ++run) {
    start(item.slug());
    result.runs.push_back(run_bench(item, {.warmup_steps = plan.warmup_steps,
                                           .threads = plan.threads,
                                           .times_products = true,
                                           .on_step = listener.on_step}));
    const GemmCeiling& ceiling = result.runs.back().ceiling;
    if (ceiling.flops_per_second > result.ceiling.flops_per_second) result.ceiling = ceiling;
  }
  return result;
}

}  // namespace isoshard
