// SPDX-License-Identifier: Apache-2.0
/// The experiments of docs/internals/experiments.md: how far tensor parallelism moves a forward
/// pass, and why.
///
/// Each runs on forked ranks with the real communicator and the real layers of
/// src/subjects/parallel; rank 0 also runs the single process's ops, and compares. Inputs and
/// weights are Philox normals by name, of which every rank reads its own part only.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"
#include "harness/report/report.h"

namespace isoshard {

/// kInit: are initial weights the same for every tp? kColumnRow: one column- and one row-parallel
/// layer. kStack: column-row pairs one after the other. kGrowth: a transformer, layer by layer.
enum class ExperimentKind : std::uint8_t { kInit, kColumnRow, kStack, kGrowth };
/// init, column-row, stack, growth.
[[nodiscard]] std::string_view name_of(ExperimentKind kind) noexcept;
/// Errors   UsageError with a suggestion and the names.
[[nodiscard]] ExperimentKind parse_experiment_kind(std::string_view name);

/// Sizes with which one experiment runs. kInit uses layers, hidden, heads, ffn; kColumnRow
/// multiplies [seq, batch, ffn] by [hidden, ffn]; kStack multiplies [seq, batch, hidden] by [ffn,
/// hidden] and back; kGrowth uses all.
struct ExperimentSettings {
  std::vector<int> tp = {4};  ///< several for kInit, one for the others
  std::vector<Dtype> dtypes = {Dtype::kBFloat16};
  std::vector<ReductionOrder> orders = {ReductionOrder::kRing};
  std::int64_t layers = 1, hidden_size = 1024, num_heads = 16, ffn_size = 4096, seq_length = 4096,
               batch_size = 2;
  std::uint64_t seed = 12345;
  std::int64_t deadline_ms = 7'200'000;      ///< of each world
  Device::Kind device = Device::Kind::kCpu;  ///< where tensors of all ranks are

  /// Errors   UsageError with the numbers: sizes < 1, more layers than any model has, sizes that
  ///          cannot fit the machine's memory, tp that does not divide what it splits, no tp,
  ///          dtype or order, a device that this program cannot use.
  void validate(ExperimentKind kind) const;
};

/// The published sizes, or (`full` false) ones that take seconds and show the same.
[[nodiscard]] ExperimentSettings default_settings(ExperimentKind kind, bool full);

/// What an experiment found.
struct ExperimentReport {
  bool holds = true;  ///< every claim that the experiment makes holds
  std::string text;   ///< tables in the published format, and a line for each claim
  std::string json;   ///< the same as numbers: one JSON object
};

/// Shown before each part of an experiment: "bf16, ring".
using ExperimentProgress = std::function<void(std::string_view part)>;

/// Ranks    called by the controller of forked worlds.
/// Errors   as ExperimentSettings::validate; InfrastructureError if a rank fails.
[[nodiscard]] ExperimentReport run_experiment(ExperimentKind kind,
                                              const ExperimentSettings& settings,
                                              const ExperimentProgress& progress = {});
/// The same as a report. After an interrupt it holds no experiment, and exit code 130 or 143.
/// Ranks    as run_experiment.
/// Errors   as run_experiment, but for the InfrastructureError of an interrupt.
[[nodiscard]] Report report_experiment(ExperimentKind kind, const ExperimentSettings& settings,
                                       const ExperimentProgress& progress = {});
/// How many parts run_experiment will show.
[[nodiscard]] int num_parts(ExperimentKind kind, const ExperimentSettings& settings);

}  // namespace isoshard
