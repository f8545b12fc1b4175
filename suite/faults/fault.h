// SPDX-License-Identifier: Apache-2.0
/// The fault catalogue: real bugs of parallel training, injected into correct implementations, each
/// with the finding that the suite must report; and the benign variations, legal differences that
/// must not raise an alarm.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "fixtures/cases/case.h"
#include "harness/fault/collective_fault.h"
#include "harness/run/sink_chain.h"
#include "harness/verdict/verdict.h"
#include "subjects/data/sampler.h"
#include "suite/faults/injection.h"
#include "suite/record/run_case.h"

namespace isoshard {

/// The finding that a correct judge reports for the fault's smallest case.
struct ExpectedDetection {
  Stage stage = Stage::kForward;  ///< of the first finding
  /// Record name of the first finding; empty: any (the fault moves every tensor of the stage at
  /// once).
  std::string name;
  std::vector<int> ranks;  ///< ranks that may be named first
  ExpectedCause cause;     ///< of the first finding
  int step = 0;            ///< of the first finding
};

/// Code that puts a fault on a run where no Injection says what it does. Each hook may be empty; a
/// bug that shows in two places sets two. A hook is called once a run. A test double calls
/// `probe.fired()` whenever it acts, except in collectives and taps, which are counted anyway.
struct FaultHooks {
  std::function<std::shared_ptr<const CollectiveFault>(const Case&)> collective = {};
  std::function<TapMutation(const Case&, int rank)> tap = {};
  std::function<void(ShardPlan& plan, const Mesh& mesh, const FaultProbe& probe)> plan = {};
  std::function<void(TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe)> parts =
      {};
  std::function<void(std::vector<Batch>& micro_batches, const CaseData& data, const Case&, int rank,
                     int step, const FaultProbe& probe)>
      data = {};
  /// Stands between the batches of a run and its sampler.
  std::function<std::vector<std::int64_t>(const Sampler& inner, const Case& item,
                                          std::int64_t global_batch, int dp_coordinate,
                                          const FaultProbe& probe)>
      sampler = {};

  /// collective, tap, plan, parts, data, sampler: those that are set.
  [[nodiscard]] std::vector<std::string_view> names() const;
};

/// One fault, or one benign variation.
struct Fault {
  std::string id = {};  ///< as in the catalogue: dp_sum_missing
  /// A missing or extra reduction, B wrong scale, ... (docs/reference/faults.md); '-' for a benign
  /// variation.
  char fault_class = '-';
  std::vector<std::string> subjects = {};  ///< on which it can be put
  std::string summary = {};                ///< the real bug in one sentence
  std::string source = {};                 ///< where it was reported
  std::function<Case()> smallest_case = {};
  Injections injections = {};
  FaultHooks hooks = {};
  /// Empty for a benign variation: the run must conform.
  std::optional<ExpectedDetection> expected = {};
};

/// "missing or extra reduction" for 'A'.   Errors   UsageError for a letter that is no class.
[[nodiscard]] std::string_view title_of_class(char fault_class);

/// The faults, by class; each must be detected.
[[nodiscard]] std::span<const Fault> fault_catalogue();
/// Legal differences of a correct implementation; an alarm on one of them is a false alarm.
[[nodiscard]] std::span<const Fault> benign_variations();
/// For each kind of benign variation the same difference made larger than legal; each must be
/// alarmed. Their ids are those of the benign variations that they belong to.
[[nodiscard]] std::span<const Fault> benign_variation_controls();
/// Finds a fault in the first two lists.   Errors   UsageError with a suggestion.
[[nodiscard]] const Fault& find_fault(std::string_view id);

/// What is done to a run, from the fault's data: "skips grad_reduce over dp". Of hooks their names.
[[nodiscard]] std::string how_injected(const Fault& fault);

/// Run options that inject the fault; `probe` counts how often it fired.
[[nodiscard]] RunOptions with_fault(RunOptions options, const Fault& fault, const Case& item,
                                    const FaultProbe& probe);

/// A fault that changed no value of a run.
class IdleFaultError : public InfrastructureError {
 public:
  using InfrastructureError::InfrastructureError;
};

/// Errors   IdleFaultError if the fault never fired in `run`: then the run shows nothing.
void require_fired(const FaultProbe& probe, std::string_view fault, std::string_view run);

}  // namespace isoshard
