// SPDX-License-Identifier: Apache-2.0
/// Runs a case in a forked world and brings back what its ranks recorded.
#pragma once
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "fixtures/cases/case.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/inputs/inputs.h"
#include "harness/run/record.h"
#include "harness/world/forked/forked_world.h"
#include "suite/record/collective_log.h"
#include "suite/record/make_subject.h"
#include "suite/reference/policy.h"

namespace isoshard {

class CollectiveTimes;

/// Changes what a rank trains on in a step.
using BatchEdit = std::function<void(std::vector<Batch>& micro_batches, const CaseData& data,
                                     int rank, int step)>;

/// Each may be left as it is.
struct RunOptions {
  Keep keep = Keep::kWhatDiffers;
  /// With the reference, as tensors are recorded.
  bool compare = true;
  std::optional<ReductionOrder> order = {};            ///< another one than the case's
  CommDecorator decorate = {};                         ///< a fault on the communicator
  std::function<TapMutation(int rank)> mutation = {};  ///< a fault at the taps
  /// See what passes at the taps, after the fault.
  std::vector<std::function<TapObserver(int rank)>> observers = {};
  /// Faulty test doubles of the subject's seams.
  SubjectEdits edits = {};
  BatchEdit batches = {};                 ///< faulty batches or labels
  SamplerDecorator sampler = {};          ///< a faulty test double of the sampler
  std::chrono::milliseconds deadline{0};  ///< 0: the case's (case_deadline)
  /// By rank: what run_case records of collectives.
  std::shared_ptr<std::vector<CollectiveLog>> calls = {};
  /// Measures the collectives of the run's steps (suite/clock/collective_times.h); null: nothing
  /// does.
  std::shared_ptr<CollectiveTimes> times = {};
  /// Which run of the subject in its case it is, from 1: its processes are named by it.
  int number = 1;
  /// Of a case that is reloaded; run_case makes one.
  std::shared_ptr<const ScratchFolder> checkpoints = {};
};

/// The same, but nothing is compared and nothing kept: the trace has digests, for equality_of
/// (harness/verdict/equal_runs.h).
[[nodiscard]] RunOptions digests_only(RunOptions options);

/// One train step of a rank, up to and with the optimizer's; what is left is subject.state(), which
/// only records. Says in which phase the rank is.
/// Ranks    collective over the subject's world.
void run_step(Subject& subject, const Case& item, const CaseData& data, const RunOptions& options,
              Rank& rank, int step);

/// Runs the steps of a case on one rank, setup and states included, from its checkpoint on if it
/// has one; saves, and goes on in a new subject, where the case says so. A state that the case
/// would reload and that cannot be saved (UnsavableState) ends the run there, without what would
/// follow. `after_step` is called with the step behind its state, and ends the run by returning
/// false. Ranks    collective over the subject's world.
void run_steps(const Case& item, const CaseData& data, const RunOptions& options, Sink& sink,
               Rank& rank, const std::function<bool(int step)>& after_step = {});

/// The run of the case, but for what its ranks do.
[[nodiscard]] RunSpec run_spec_of(const Case& item, const RunOptions& options);

/// Starts item.world_size() ranks, and trains up to item.steps steps of item.subject with a
/// Recorder on each.
///
/// Ranks    called by the controller.
/// Errors   InfrastructureError if a rank fails (WorldReport::describe()); UsageError for an
///          unknown subject; FileError as require_usable_checkpoint.
[[nodiscard]] Trace run_case(const Case& item, const Reference& reference,
                             const RunOptions& options = {});

}  // namespace isoshard
