// SPDX-License-Identifier: Apache-2.0
/// What `isoshard bench ACTION` does besides timing one configuration. Each returns an exit code.
#pragma once
#include "harness/cli/options.h"
#include "suite/bench/bench.h"

namespace isoshard {

/// Two sides: pairs of runs. One side, a stored result: whether this program is slower than then.
[[nodiscard]] int bench_compare(const ParsedOptions& options);
/// Times all configurations, with predicted and measured memory side by side.
[[nodiscard]] int bench_sweep(const ParsedOptions& options);
/// Predicts memory of all configurations; runs nothing.
[[nodiscard]] int bench_memory_plan(const ParsedOptions& options);

/// Errors   UsageError with the bytes and, where there is one, a command that fits, if what is
///          predicted for all ranks together is more than the machine has available.
void refuse_without_memory(const BenchPlan& plan);

}  // namespace isoshard
