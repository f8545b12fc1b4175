// SPDX-License-Identifier: Apache-2.0
/// Proof that a table of a pipeline schedule can be run, and computes each gradient once.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

namespace isoshard {

enum class PipelineRule {
  kRows,           ///< one row a rank
  kRange,          ///< stages and micro-batches of the spec only
  kRank,           ///< an action is on the rank that holds its stage
  kTwice,          ///< no action twice, and no backward beside its two halves
  kMissing,        ///< every stage and micro-batch has its forward and its whole backward
  kOrder,          ///< a rank runs what an action needs before it
  kBlocked,        ///< no ranks wait for each other in a circle
  kMemory,         ///< no rank holds more forward activations than its bound
  kGradientOrder,  ///< a stage adds its gradients in ascending order of micro-batches
};

[[nodiscard]] std::string_view to_string(PipelineRule rule);

/// One broken rule. `rank`, `time_step` and `action` are where it shows: for what is missing, the
/// rank that should have it and -1.
struct PipelineFinding {
  PipelineRule rule = PipelineRule::kRows;
  int rank = -1;
  int time_step = -1;
  std::optional<PipelineAction> action;
  std::string message;  ///< names rank, time step and action in words
};

/// Checks any table against its spec, whoever made it. No finding proves that
/// - every stage runs forward once for each micro-batch, and backward once, whole or in halves;
/// - ranks that run their rows in order never wait for each other forever;
/// - every rank stays within `bound` (by rank; memory_bound(spec) if empty);
/// - the sum of gradients of a stage has one order, ascending, which makes it repeatable bit by
///   bit and equal to that of one process.
///
/// Findings are sorted by rule, rank and time step. Where kRows or kRange is broken, nothing else
/// is looked at. One wrong action may break several rules: a rank that never gets what is missing
/// is blocked, too. kOrder, kBlocked, kMemory and kGradientOrder name the first place of each rank.
/// Errors   UsageError for a spec with a count below 1, or a bound without one number a rank.
[[nodiscard]] std::vector<PipelineFinding> check(const PipelineSchedule& schedule,
                                                 std::span<const int> bound = {});

/// Errors   UsageError that lists all findings of check().
void require_sound(const PipelineSchedule& schedule, std::span<const int> bound = {});

/// By rank, the most forward activations that are alive at once (memory_bound() says when one is).
/// Requires   a table without findings of kTwice, kMissing and kOrder.
[[nodiscard]] std::vector<int> peak_activations(const PipelineSchedule& schedule);

}  // namespace isoshard
