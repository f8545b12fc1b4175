// SPDX-License-Identifier: Apache-2.0
/// The fault catalogue: real bugs of parallel training, injected from outside, each with what the suite must say about it.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/subjects/run_case.h"
#include "fixtures/cases/case.h"
#include "harness/compare/verdict.h"
#include "harness/fault/collective_fault.h"
#include "harness/trace/recorder.h"

namespace isoshard {

/// What a correct judge says of the fault's smallest case.
struct ExpectedDetection {
  Stage stage;             ///< of the first finding
  std::string name;        ///< record name of the first finding; empty: any (the fault moves every tensor of the stage at once)
  std::vector<int> ranks;  ///< ranks that may be named first
  std::string diagnosis;   ///< must stand in the diagnosis
};

/// One fault. `collective` or `mutation` is set; both are asked per run, on the controller, before the fork.
struct Fault {
  std::string id;       ///< as in the catalogue: dp_sum_missing
  char fault_class;     ///< A missing or extra reduction, B wrong scale, ... (docs/faults.md)
  std::string summary;  ///< the real bug in one sentence
  std::string source;   ///< where it was reported
  std::function<Case()> smallest_case;
  std::function<std::shared_ptr<const CollectiveFault>(const Case&)> collective;
  std::function<TapMutation(const Case&, int rank)> mutation;
  ExpectedDetection expected;
};

[[nodiscard]] std::span<const Fault> fault_catalogue();
/// Errors   UsageError with a suggestion.
[[nodiscard]] const Fault& find_fault(std::string_view id);

/// Run options that inject the fault; `probe` counts how often it fired.
[[nodiscard]] RunOptions with_fault(RunOptions options, const Fault& fault, const Case& item, const FaultProbe& probe);

}  // namespace isoshard
