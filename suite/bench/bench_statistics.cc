// SPDX-License-Identifier: Apache-2.0
// Means, quantiles and sums.
#include "suite/bench/bench_statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "suite/bench/formulas/flops.h"
#include "suite/clock/collective_times.h"

namespace isoshard {
namespace {

double gb(std::int64_t bytes) {
  return static_cast<double>(bytes) / kBytesPerGb;
}

double rate(double amount, double seconds) {
  return seconds > 0 ? amount / seconds : 0;
}

/// Over all ranks and counted steps.
void add_hidden(const BenchResult& result, BenchSummary& summary) {
  double hidden = 0, communication = 0, count = 0;
  for (const BenchRun& run : result.runs) {
    if (!run.has_hidden) return;
    for (const RankRun& rank : run.ranks) {
      for (auto i = static_cast<std::size_t>(run.warmup_steps); i < rank.steps.size(); ++i) {
        hidden += rank.steps[i].times.hidden;
        communication += rank.steps[i].times.of(StepPart::kCommunication);
        ++count;
      }
    }
  }
  summary.hidden_s = rate(hidden, count);
  summary.hidden_share = rate(hidden, hidden + communication);
}

std::optional<double> share_of_ceiling(double flops, double seconds, const GemmCeiling& ceiling) {
  const double share = rate(rate(flops, seconds), ceiling.flops_per_second);
  if (!(share > 0 && share <= 1)) return std::nullopt;
  return share;
}

}  // namespace

double quantile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(place));
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return std::lerp(values[below], values[above], place - std::floor(place));
}

double mean_of(const std::vector<double>& values) {
  return values.empty() ? 0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

double deviation_of(const std::vector<double>& values) {
  if (values.size() < 2) return 0;
  const double mean = mean_of(values);
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

std::vector<WorldStep> world_steps(const BenchRun& run, const Case& item) {
  std::vector<WorldStep> steps;
  for (auto i = static_cast<std::size_t>(run.warmup_steps); i < run.num_steps(); ++i) {
    const RankStep& slowest = run.ranks[run.slowest(i)].steps[i];
    WorldStep step;
    step.step = static_cast<int>(i);
    step.loss = run.ranks.front().steps[i].loss;
    step.grad_norm = run.ranks.front().steps[i].grad_norm;
    step.times = slowest.times;
    step.tokens_per_second = rate(tokens_per_step(item), slowest.times.total);
    step.samples_per_second = rate(samples_per_step(item), slowest.times.total);
    for (const RankRun& rank : run.ranks) {
      const TensorBytes& memory = rank.steps[i].memory;
      step.allocated_gb = std::max(step.allocated_gb, gb(memory.allocated));
      step.peak_gb = std::max(step.peak_gb, gb(memory.peak));
      step.allocated_all_gb += gb(memory.allocated);
      step.peak_all_gb += gb(memory.peak);
    }
    steps.push_back(step);
  }
  return steps;
}

std::vector<ReportCollective> purpose_rows(const BenchRun& run) {
  std::vector<PurposeTimes> ranks;
  for (const RankRun& rank : run.ranks) ranks.push_back(rank.purposes);
  return purpose_rows(ranks, static_cast<double>(run.num_steps()) - run.warmup_steps,
                      run.has_hidden);
}

BenchSummary summary_of(const BenchResult& result) {
  const Case& item = result.plan.item;
  BenchSummary summary;
  std::vector<double> seconds, losses;
  double communication = 0, in_backward = 0;
  for (const BenchRun& run : result.runs) {
    double resident = 0;
    for (const RankRun& rank : run.ranks) resident += gb(rank.peak_resident_bytes);
    summary.resident_all_gb = std::max(summary.resident_all_gb, resident);
    for (const WorldStep& step : world_steps(run, item)) {
      seconds.push_back(step.times.total);
      losses.push_back(step.loss);
      summary.final_loss = step.loss;
      summary.peak_gb = std::max(summary.peak_gb, step.peak_gb);
      summary.peak_all_gb = std::max(summary.peak_all_gb, step.peak_all_gb);
      summary.times.total += step.times.total;
      for (std::size_t p = 0; p < kNumStepParts; ++p) {
        summary.times.parts[p] += step.times.parts[p];
        summary.times.communication_in[p] += step.times.communication_in[p];
      }
    }
  }
  summary.num_steps = seconds.size();
  if (seconds.empty()) return summary;
  const auto count = static_cast<double>(seconds.size());
  summary.times.total /= count;
  for (std::size_t p = 0; p < kNumStepParts; ++p) {
    summary.times.parts[p] /= count;
    summary.times.communication_in[p] /= count;
    communication += summary.times.communication_in[p];
  }
  in_backward = summary.times.communication_in[static_cast<std::size_t>(StepPart::kBackward)];
  summary.in_backward_share = communication > 0 ? in_backward / communication : 0;
  add_hidden(result, summary);
  summary.mean_s = mean_of(seconds);
  summary.deviation_s = deviation_of(seconds);
  summary.p50_s = quantile(seconds, 0.5);
  summary.p95_s = quantile(seconds, 0.95);
  summary.mean_loss = mean_of(losses);
  summary.tokens_per_second = rate(tokens_per_step(item), summary.mean_s);
  summary.samples_per_second = rate(samples_per_step(item), summary.mean_s);
  const StepFlops flops = step_flops(item);
  summary.model_flops = flops.model;
  summary.hardware_flops = flops.hardware;
  summary.model_utilization = share_of_ceiling(flops.model, summary.mean_s, result.ceiling);
  summary.hardware_utilization = share_of_ceiling(flops.hardware, summary.mean_s, result.ceiling);
  return summary;
}

}  // namespace isoshard
