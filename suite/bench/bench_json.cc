// SPDX-License-Identifier: Apache-2.0
// Names and units are those of the tool: seconds in steps, milliseconds in the summary, GiB.
#include "suite/bench/bench_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "harness/golden/build_info.h"
#include "harness/report/json/evidence_json.h"
#include "harness/world/machine.h"
#include "subjects/registry/subject_spec.h"
#include "suite/bench/bench_statistics.h"
#include "suite/reference/device/device_collectives.h"

namespace isoshard {
namespace {

using json = nlohmann::ordered_json;

json step_json(const WorldStep& step) {
  const StepTimes& times = step.times;
  return {{"step", step.step},
          {"loss", step.loss},
          {"grad_norm", step.grad_norm},
          {"step_time_s", times.total},
          {"forward_time_s", times.of(StepPart::kForward)},
          {"backward_time_s", times.of(StepPart::kBackward)},
          {"optimizer_time_s", times.of(StepPart::kOptimizer)},
          {"communication_time_s", times.of(StepPart::kCommunication)},
          {"other_time_s", times.of(StepPart::kOther)},
          {"tokens_per_sec", step.tokens_per_second},
          {"samples_per_sec", step.samples_per_second},
          {"memory_allocated_gb", step.allocated_gb},
          {"memory_peak_gb", step.peak_gb},
          {"memory_allocated_all_ranks_gb", step.allocated_all_gb},
          {"memory_peak_all_ranks_gb", step.peak_all_gb}};
}

double part_percent(const StepTimes& times, StepPart part) {
  return times.total > 0 ? kPercent * times.of(part) / times.total : 0;
}

double communication_in(const StepTimes& times, StepPart part) {
  return kMillisecondsPerSecond * times.communication_in[static_cast<std::size_t>(part)];
}

json or_null(const std::optional<double>& value) {
  return value.has_value() ? json(*value) : json(nullptr);
}

json summary_json(const BenchSummary& summary) {
  const StepTimes& times = summary.times;
  return {{"num_steps", summary.num_steps},
          {"avg_step_time_ms", kMillisecondsPerSecond * summary.mean_s},
          {"std_step_time_ms", kMillisecondsPerSecond * summary.deviation_s},
          {"p50_step_time_ms", kMillisecondsPerSecond * summary.p50_s},
          {"p95_step_time_ms", kMillisecondsPerSecond * summary.p95_s},
          {"avg_tokens_per_sec", summary.tokens_per_second},
          {"avg_samples_per_sec", summary.samples_per_second},
          {"avg_loss", summary.mean_loss},
          {"final_loss", summary.final_loss},
          {"peak_memory_gb", summary.peak_gb},
          {"peak_memory_all_ranks_gb", summary.peak_all_gb},
          {"peak_resident_all_ranks_gb", summary.resident_all_gb},
          {"timing_breakdown",
           {{"forward_pct", part_percent(times, StepPart::kForward)},
            {"backward_pct", part_percent(times, StepPart::kBackward)},
            {"optimizer_pct", part_percent(times, StepPart::kOptimizer)},
            {"communication_pct", part_percent(times, StepPart::kCommunication)},
            {"other_pct", part_percent(times, StepPart::kOther)}}},
          {"communication_ms",
           {{"in_forward", communication_in(times, StepPart::kForward)},
            {"in_backward", communication_in(times, StepPart::kBackward)},
            {"in_optimizer", communication_in(times, StepPart::kOptimizer)},
            {"elsewhere", communication_in(times, StepPart::kOther)}}},
          {"overlap",
           {{"hidden_share", or_null(summary.hidden_share)},
            {"hidden_ms",
             summary.hidden_s ? json(kMillisecondsPerSecond * *summary.hidden_s) : json(nullptr)},
            {"issued_in_backward_share", summary.in_backward_share}}},
          {"model_flops_per_step", summary.model_flops},
          {"hardware_flops_per_step", summary.hardware_flops},
          {"model_flops_utilization", or_null(summary.model_utilization)},
          {"hardware_flops_utilization", or_null(summary.hardware_utilization)}};
}

json ranks_json(const BenchRun& run, const Case& item) {
  json ranks = json::array();
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    const RankRun& rank = run.ranks[r];
    StepTimes sum;
    std::int64_t allocated = 0, peak = 0;
    double count = 0;
    for (auto i = static_cast<std::size_t>(run.warmup_steps); i < rank.steps.size(); ++i, ++count) {
      const RankStep& step = rank.steps[i];
      sum.total += step.times.total;
      for (std::size_t p = 0; p < kNumStepParts; ++p) sum.parts[p] += step.times.parts[p];
      allocated = std::max(allocated, step.memory.allocated);
      peak = std::max(peak, step.memory.peak);
    }
    json place = json::object();
    const MeshShape mesh = item.mesh();
    for (const AxisDegree& axis : mesh.axes())
      place[std::string(name_of(axis.axis))] = mesh.coordinate(static_cast<int>(r), axis.axis);
    const auto mean = [&](StepPart part) { return kMillisecondsPerSecond * sum.of(part) / count; };
    ranks.push_back(
        {{"rank", r},
         {"coordinates", std::move(place)},
         {"step_ms", kMillisecondsPerSecond * sum.total / count},
         {"forward_ms", mean(StepPart::kForward)},
         {"backward_ms", mean(StepPart::kBackward)},
         {"optimizer_ms", mean(StepPart::kOptimizer)},
         {"communication_ms", mean(StepPart::kCommunication)},
         {"other_ms", mean(StepPart::kOther)},
         {"memory_after_setup_gb", static_cast<double>(rank.setup_bytes) / kBytesPerGb},
         {"memory_allocated_gb", static_cast<double>(allocated) / kBytesPerGb},
         {"memory_peak_gb", static_cast<double>(peak) / kBytesPerGb},
         {"resident_peak_gb", static_cast<double>(rank.peak_resident_bytes) / kBytesPerGb},
         {"setup_s", rank.setup_seconds}});
  }
  return ranks;
}

std::string_view name_of(StepPart part) {
  switch (part) {
    case StepPart::kForward:
      return "forward";
    case StepPart::kBackward:
      return "backward";
    case StepPart::kOptimizer:
      return "optimizer";
    case StepPart::kCommunication:
      return "communication";
    case StepPart::kOther:
      break;
  }
  return "other";
}

/// The last step, a lane for each rank, from the moment at which the first of them began it;
/// without a common clock each from its own begin, as they begin together.
json timeline_json(const BenchRun& run) {
  constexpr std::size_t kMostOfALane = 4000;
  double start = std::numeric_limits<double>::infinity();
  for (const RankRun& rank : run.ranks)
    if (!rank.spans.empty()) start = std::min(start, rank.spans.front().begin);
  json lanes = json::array();
  for (const RankRun& rank : run.ranks) {
    const std::size_t count = std::min(rank.spans.size(), kMostOfALane);
    json spans = json::array();
    if (!run.has_one_clock && !rank.spans.empty()) start = rank.spans.front().begin;
    for (const StepSpan& span : std::span(rank.spans).first(count)) {
      const bool is_call = span.part == StepPart::kCommunication;
      spans.push_back({is_call ? name_of(span.purpose) : name_of(span.part),
                       kMillisecondsPerSecond * (span.begin - start),
                       kMillisecondsPerSecond * (span.end - start)});
    }
    const bool is_cut = rank.spans.size() > count || rank.spans.size() == kMostSpans;
    lanes.push_back({{"spans", std::move(spans)}, {"cut", is_cut}});
  }
  return {{"step", run.num_steps() - 1}, {"ranks", std::move(lanes)}};
}

}  // namespace

json machine_json() {
  const Machine machine = this_machine();
  return {{"system", machine.system},
          {"cpu", machine.cpu},
          {"cpu_features", machine.cpu_features},
          {"cores", machine.cores},
          {"memory_gb", static_cast<double>(machine.memory_bytes) / kBytesPerGb}};
}

json bench_config_json(const BenchPlan& plan) {
  const Case& item = plan.item;
  const TrainSettings& settings = item.settings;
  return {{"model_name", plan.model_name},
          {"impl", plan.impl},
          {"num_layers", item.config.num_layers},
          {"attn_impl", name_of(item.attention)},
          {"tp_size", item.degrees.tp},
          {"dp_size", item.degrees.dp},
          {"pp_size", item.degrees.pp},
          {"cp_size", item.degrees.cp},
          {"world_size", num_processes(item)},
          {"zero_stage", settings.zero_stage},
          {"use_vocab_parallel", settings.make_vocab_size_divisible_by > 0 ||
                                     subject_spec(item.subject).traits.splits_vocabulary},
          {"batch_size", item.batch_size},
          {"seq_length", item.seq_length},
          {"num_training_steps", item.steps},
          {"learning_rate", settings.optimizer.learning_rate},
          {"weight_decay", settings.optimizer.weight_decay},
          {"gradient_accumulation_steps", item.micro_batches},
          {"max_grad_norm", settings.max_grad_norm},
          {"dtype", name_of(settings.autocast.value_or(item.dtype))},
          {"autocast", settings.autocast.has_value()},
          {"activation_checkpointing", settings.recompute_every > 0},
          {"warmup_steps", plan.warmup_steps},
          {"log_interval", plan.log_interval},
          {"output_dir", plan.output_dir.string()},
          {"seed", item.seed},
          {"threads", plan.threads},
          {"repeat", plan.repeat},
          {"case", item.slug()},
          {"arguments", plan.arguments}};
}

json bench_json(const BenchResult& result) {
  const BenchRun& last = result.runs.back();
  json steps = json::array(), runs = json::array();
  for (const WorldStep& step : world_steps(last, result.plan.item))
    steps.push_back(step_json(step));
  for (const BenchRun& run : result.runs) {
    const std::vector<double> seconds = run.step_seconds();
    runs.push_back({{"avg_step_time_ms", kMillisecondsPerSecond * mean_of(seconds)},
                    {"p50_step_time_ms", kMillisecondsPerSecond * quantile(seconds, 0.5)}});
  }
  json machine = machine_json();
  machine["gemm_ceiling_flops_per_sec"] = result.ceiling.flops_per_second;
  machine["gemm_ceiling_size"] = result.ceiling.size;
  machine["gemm_ceiling_threads"] = result.ceiling.threads;
  if (result.plan.item.device != Device::Kind::kCpu) {
    machine["device"] = "cuda";
    machine["device_collectives"] = device_collectives(result.plan.item).words;
  }
  const BuildInfo build = build_info();
  return {{"config", bench_config_json(result.plan)},
          {"steps", std::move(steps)},
          {"summary", summary_json(summary_of(result))},
          {"runs", std::move(runs)},
          {"ranks", ranks_json(last, result.plan.item)},
          {"collectives", collectives_json(purpose_rows(last))},
          {"timeline", timeline_json(last)},
          {"gate",
           {{"state", name_of(result.gate.state)},
            {"case", result.gate.twin},
            {"strength", result.gate.strength}}},
          {"machine", std::move(machine)},
          {"build", {{"commit", build.commit}, {"state", build.state}}}};
}

}  // namespace isoshard
