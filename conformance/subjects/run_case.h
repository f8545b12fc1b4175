// SPDX-License-Identifier: Apache-2.0
/// Runs a case in a forked world and brings back what its ranks recorded.
#pragma once
#include <chrono>
#include <functional>

#include "fixtures/cases/case.h"
#include "harness/compare/verdict.h"
#include "harness/trace/recorder.h"
#include "harness/world/forked_world.h"

namespace isoshard {

struct RunOptions {
  Keep keep = Keep::kWhatDiffers;
  CommDecorator decorate;                         ///< a fault on the communicator, or nothing
  std::function<TapMutation(int rank)> mutation;  ///< a fault at the taps, or nothing
  std::chrono::milliseconds deadline{600'000};
};

/// Forks item.world_size() ranks, runs setup and item.steps train steps of item.subject with a Recorder on each.
///
/// Ranks    called by the controller.
/// Errors   InfrastructureError if a rank fails (WorldReport::describe()); UsageError for an unknown subject.
[[nodiscard]] Trace run_case(const Case& item, const Reference& reference, const RunOptions& options = {});

/// The judge's options that follow from the settings: dtype, declared gradient scale.
[[nodiscard]] JudgeOptions judge_options(const Case& item);

}  // namespace isoshard
