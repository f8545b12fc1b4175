// SPDX-License-Identifier: Apache-2.0
/// A table that is run without data: when each action starts, and what never does.
#pragma once
#include <vector>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

namespace isoshard {

/// How long actions take, in any unit. `transfer` passes between the end of an action and the start
/// of one on another rank that needs its result; it delays nobody else.
struct ActionCosts {
  double forward = 1;
  double backward = 2;
  double backward_input = 1;
  double backward_weight = 1;
  double transfer = 0;
};

/// Every action takes one step.
inline constexpr ActionCosts kUnitCosts{1, 1, 1, 1, 0};

[[nodiscard]] double cost_of(ActionKind kind, const ActionCosts& costs);

struct SimulatedAction {
  int rank = 0;
  int time_step = 0;  ///< the column of the table
  PipelineAction action;
  double start = 0, end = 0;
};

/// The next action of a rank that cannot go on.
struct BlockedAction {
  int rank = 0;
  int time_step = 0;
  PipelineAction action;
  /// What it waits for. A gradient of an output is named as kBackward where the table holds neither
  /// that nor kBackwardInput.
  PipelineAction waits_for;
};

struct Simulation {
  std::vector<SimulatedAction> ran;    ///< by (start, rank)
  std::vector<BlockedAction> blocked;  ///< by rank; empty: every action ran
};

/// Runs each rank's actions in the table's order, each as soon as its rank is free and what it
/// needs is done. A forward needs the forward of the stage before. A backward or backward_input
/// needs its own forward and the input's gradient of the stage after. A backward_weight needs its
/// backward_input.
///
/// Requires   stages and micro-batches of the table within the spec.
[[nodiscard]] Simulation simulate(const PipelineSchedule& schedule, const ActionCosts& costs);

/// The same order of actions, each at its earliest time step if each takes one.
/// Errors   UsageError if an action can never run, with its rank and time step.
[[nodiscard]] PipelineSchedule aligned(const PipelineSchedule& schedule);

struct PipelineTiming {
  double makespan = 0;  ///< from the first start to the last end
  /// Work of the busiest rank: what it would take without bubbles.
  double ideal = 0;
  /// The part of all ranks' time that is idle: 1 - sum of work / (pp * makespan).
  double bubble_share = 0;
  std::vector<double> work;  ///< by rank
};

/// Time of a schedule for given costs. For equal stages, pp ranks, M micro-batches and B the time
/// of input and weight gradient together, GPipe and 1F1B take (M + pp - 1) (F + B), so their
/// bubble share is (pp - 1) / (M + pp - 1); Interleaved1F1B on a loop with v stages a rank has
/// (pp - 1) / (v M + pp - 1).
///
/// Units    those of the costs.
/// Errors   UsageError for a negative cost, or as aligned().
/// Source   Narayanan et al. 2021 (arXiv 2104.04473), sections 2.2.1 and 2.2.2.
[[nodiscard]] PipelineTiming timing(const PipelineSchedule& schedule,
                                    const ActionCosts& costs = {});

}  // namespace isoshard
