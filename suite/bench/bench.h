// SPDX-License-Identifier: Apache-2.0
/// What `isoshard bench` times, and what came out.
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"
#include "suite/bench/bench_run.h"
#include "suite/bench/gate.h"
#include "suite/bench/gemm_ceiling.h"

namespace isoshard {

struct BenchPlan {
  Case item;               ///< validated
  std::string impl;        ///< as the tool of seeds.md, section 4, calls it: "fsdp_dtensor"
  std::string model_name;  ///< as it was given
  int warmup_steps = 5;
  int log_interval = 10;
  int threads = 1;  ///< of each rank
  int repeat = 1;   ///< runs, each in fresh processes where ranks are forked
  bool is_gated = true;
  std::filesystem::path output_dir;
  std::vector<std::string> arguments = {};  ///< flags that ask for the same again
};

struct BenchResult {
  BenchPlan plan;
  GateResult gate;
  GemmCeiling ceiling;         ///< the highest of the runs
  std::vector<BenchRun> runs;  ///< none if the gate was not passed
};

/// Listens: for a progress line and to print as it goes.
struct BenchListener {
  std::function<void(const std::string& what)> on_start = {};
  std::function<void(const GateResult&)> on_gate = {};
  /// In rank 0's process.
  std::function<void(int step)> on_step = {};
};

/// impl -> subject. "fsdp_dtensor" is fsdp_tp; the others have the names of their subjects.
/// Errors   UsageError with a suggestion and the names.
[[nodiscard]] std::string subject_of_impl(std::string_view impl);
[[nodiscard]] std::vector<std::string> bench_impls();

/// Passes the gate, then trains.
/// Ranks   called by the controller; with peers (Launcher::peers) collective over them.
/// Errors  as pass_gate and run_bench.
[[nodiscard]] BenchResult bench(const BenchPlan& plan, const BenchListener& listener);

/// The ranks of the case's world; one for the reference, whatever batches it stands for.
[[nodiscard]] int num_processes(const Case& item);

/// Threads for each rank so that a machine's cores are used, and not more: at least one.
[[nodiscard]] int usual_threads(const Case& item);

/// results_IMPL_tpT_dpD.json, with ppP and cpC behind it where they are not 1.
[[nodiscard]] std::string results_file_name(const BenchPlan& plan);

}  // namespace isoshard
