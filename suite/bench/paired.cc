// SPDX-License-Identifier: Apache-2.0
// Means of logarithms of ratios.
#include "suite/bench/paired.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "core/base/error.h"
#include "harness/stats/student.h"
#include "suite/bench/bench_statistics.h"
#include "suite/bench/formulas/flops.h"
#include "suite/reference/warm_up_training.h"

namespace isoshard {
namespace {

void require_enough(std::size_t count, std::string_view what) {
  if (count < static_cast<std::size_t>(kFewestPairs))
    throw UsageError(
        fmt::format("a comparison needs at least {} {}, got {}", kFewestPairs, what, count));
}

std::vector<double> logarithms(std::span<const double> values) {
  std::vector<double> result;
  for (const double value : values) result.push_back(std::log(value));
  return result;
}

RatioInterval interval_of(double mean, double error, double freedom, double confidence) {
  const double half = error == 0 ? 0 : student_quantile(freedom, 1 - confidence) * error;
  return {std::exp(mean), std::exp(mean - half), std::exp(mean + half), confidence};
}

}  // namespace

std::string_view name_of(PairedVerdict verdict) noexcept {
  return verdict == PairedVerdict::kFaster   ? "faster"
         : verdict == PairedVerdict::kSlower ? "slower"
                                             : "not told apart";
}

PairedVerdict RatioInterval::verdict() const noexcept {
  if (high < 1) return PairedVerdict::kFaster;
  return low > 1 ? PairedVerdict::kSlower : PairedVerdict::kNotTold;
}

RatioInterval ratio_of_pairs(std::span<const double> a, std::span<const double> b,
                             double confidence) {
  require_enough(a.size(), "pairs of runs");
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(std::log(b[i] / a[i]));
  const auto count = static_cast<double>(ratios.size());
  return interval_of(mean_of(ratios), deviation_of(ratios) / std::sqrt(count), count - 1,
                     confidence);
}

RatioInterval ratio_of_samples(std::span<const double> a, std::span<const double> b,
                               double confidence) {
  require_enough(a.size(), "runs of A");
  require_enough(b.size(), "runs of B");
  const std::vector<double> log_a = logarithms(a), log_b = logarithms(b);
  const auto share = [](const std::vector<double>& values) {
    return deviation_of(values) * deviation_of(values) / static_cast<double>(values.size());
  };
  const double va = share(log_a), vb = share(log_b), sum = va + vb;
  const double freedom = sum == 0 ? 1
                                  : sum * sum /
                                        (va * va / static_cast<double>(a.size() - 1) +
                                         vb * vb / static_cast<double>(b.size() - 1));
  return interval_of(mean_of(log_b) - mean_of(log_a), std::sqrt(sum), freedom, confidence);
}

double seconds_per_token(const BenchRun& run, const Case& item) {
  return quantile(run.step_seconds(), 0.5) / tokens_per_step(item);
}

PairedRuns run_pairs(const BenchPlan& a, const BenchPlan& b, int pairs,
                     const BenchListener& listener, const std::function<void(int pair)>& on_pair) {
  PairedRuns result;
  warm_up_training({a.item, b.item});
  const auto pass = [&](const BenchPlan& plan, GateResult& gate) {
    if (plan.is_gated) gate = pass_gate(plan.item, gate_folder(plan.output_dir));
    if (listener.on_gate) listener.on_gate(gate);
    return gate.state != GateState::kFails;
  };
  if (!pass(a, result.gate_a) || !pass(b, result.gate_b)) return result;
  const auto time = [&](const BenchPlan& plan, std::vector<double>& times) {
    if (listener.on_start) listener.on_start(plan.item.slug());
    const BenchRun run = run_bench(
        plan.item,
        {.warmup_steps = plan.warmup_steps, .threads = plan.threads, .on_step = listener.on_step});
    times.push_back(seconds_per_token(run, plan.item));
  };
  for (int pair = 0; pair < pairs; ++pair) {
    const bool a_first = pair % 2 == 0;
    if (a_first) time(a, result.a);
    time(b, result.b);
    if (!a_first) time(a, result.a);
    if (on_pair) on_pair(pair);
  }
  return result;
}

}  // namespace isoshard
