// SPDX-License-Identifier: Apache-2.0
/// Trains a case with a clock on every rank, and brings back what each step took.
#pragma once
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "fixtures/cases/case.h"
#include "suite/bench/counted_memory.h"
#include "suite/bench/gemm_ceiling.h"
#include "suite/clock/step_clock.h"

namespace isoshard {

/// One step on one rank.
struct RankStep {
  StepTimes times;
  double loss = 0, grad_norm = 0;
  TensorBytes memory;  ///< at its end; the peak since its begin
};

struct RankRun {
  std::vector<RankStep> steps;  ///< all of the run, warm-up included
  /// Of the steps after the warm-up.
  PurposeTimes purposes{};
  bool has_hidden = false;             ///< whether what is hidden was measured
  std::vector<StepSpan> spans;         ///< of the last step, in their order
  std::vector<ProductRates> products;  ///< where they were asked for: of each moment
  double setup_seconds = 0;
  std::int64_t setup_bytes = 0;  ///< tensors held after setup
  std::int64_t peak_resident_bytes = 0;
};

struct BenchRun {
  std::vector<RankRun> ranks;
  int warmup_steps = 0;
  int threads = 1;
  GemmCeiling ceiling;        ///< 0 where no products were asked for
  bool has_hidden = false;    ///< on all ranks
  bool has_one_clock = true;  ///< whether spans of all ranks are of one machine's clock

  [[nodiscard]] std::size_t num_steps() const noexcept {
    return ranks.empty() ? 0 : ranks.front().steps.size();
  }
  /// The rank that took longest in a step.
  [[nodiscard]] std::size_t slowest(std::size_t step) const;
  /// The times of the steps after the warm-up, in seconds: of the slowest rank in each.
  [[nodiscard]] std::vector<double> step_seconds() const;
};

struct BenchRunOptions {
  int warmup_steps = 5;
  int threads = 1;  ///< of each rank
  /// Whether ranks multiply matrices before the warm-up, after the last step and, in long runs,
  /// between, so that utilization can be told (gemm_ceiling.h). Steps do not count this time.
  bool times_products = false;
  /// Called on rank 0 after each step; may be empty.
  std::function<void(int step)> on_step = {};
};

/// All ranks begin a step together: a barrier before it is not timed. Nothing is recorded, and
/// tensors are not filled when they are allocated. Ranks are those of default_launcher(): fresh
/// processes, or with Launcher::peers the processes that judge together.
///
/// Requires   a valid case whose steps are more than the warm-up's.
/// Ranks      called by the controller; with peers collective over them.
/// Errors     InfrastructureError as require_ok.
[[nodiscard]] BenchRun run_bench(const Case& item, const BenchRunOptions& options);

}  // namespace isoshard
