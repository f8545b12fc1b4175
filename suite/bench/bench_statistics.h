// SPDX-License-Identifier: Apache-2.0
/// From the steps of all ranks to the numbers of a report.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "harness/report/report.h"
#include "suite/bench/bench.h"

namespace isoshard {

inline constexpr double kBytesPerGb = 1024.0 * 1024 * 1024;
inline constexpr double kMillisecondsPerSecond = 1000, kPercent = 100;

/// Requires   values, and 0 <= share <= 1.
/// Returns the value below which that share of them lies, linearly between two.
[[nodiscard]] double quantile(std::vector<double> values, double share);
[[nodiscard]] double mean_of(const std::vector<double>& values);
/// Of a sample: divided by n - 1; 0 for one value.
[[nodiscard]] double deviation_of(const std::vector<double>& values);

/// One step of the whole world. Times are those of the rank that took longest in it, so that its
/// parts add up to it.
struct WorldStep {
  int step = 0;
  double loss = 0, grad_norm = 0;
  StepTimes times;
  double tokens_per_second = 0, samples_per_second = 0;
  /// At the step's end and at its peak: of the rank that holds most, and of all ranks together.
  double allocated_gb = 0, peak_gb = 0, allocated_all_gb = 0, peak_all_gb = 0;
};
[[nodiscard]] std::vector<WorldStep> world_steps(const BenchRun& run, const Case& item);

/// Of the steps after the warm-up.
[[nodiscard]] std::vector<ReportCollective> purpose_rows(const BenchRun& run);

struct BenchSummary {
  std::size_t num_steps = 0;
  double mean_s = 0, deviation_s = 0, p50_s = 0, p95_s = 0;
  double tokens_per_second = 0, samples_per_second = 0;
  double mean_loss = 0, final_loss = 0;
  double peak_gb = 0, peak_all_gb = 0, resident_all_gb = 0;
  /// Means of the slowest ranks' parts.
  StepTimes times;
  /// Share of communication that was issued while backward was under way, and so could be hidden
  /// by a backend that does not block.
  double in_backward_share = 0;
  /// Of the time in which transfers of a rank were on their way, or it waited in a call: the share
  /// in which it did something else. 0 where every call returns with its result.
  /// None on ranks that cannot say what is on its way.
  std::optional<double> hidden_share, hidden_s;  ///< over all ranks; of a step on the mean rank
  double model_flops = 0, hardware_flops = 0;    ///< of a step
  /// None where steps were faster than any product beside them, which says that the ceiling is
  /// none, or where no product was timed.
  std::optional<double> model_utilization, hardware_utilization;
};
/// Of all steps after the warm-up, of all runs.
[[nodiscard]] BenchSummary summary_of(const BenchResult& result);

}  // namespace isoshard
