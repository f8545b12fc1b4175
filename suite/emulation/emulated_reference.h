// SPDX-License-Identifier: Apache-2.0
/// The reference that leaves no tolerance: a subject's declared arithmetic, carried out in one
/// process.
#pragma once
#include <chrono>
#include <string>

#include "fixtures/cases/case.h"
#include "harness/run/record.h"
#include "harness/trace/reference.h"
#include "subjects/parallel/numerics_spec.h"

namespace isoshard {

struct EmulationOptions {
  /// Recorded statistics are against it; nullptr: nothing is compared.
  const Reference* compare_with = nullptr;
  Keep keep = Keep::kEverything;
  std::chrono::milliseconds deadline{0};  ///< 0: the case's (case_deadline), for each rank
  int number = 1;  ///< which emulation of its case it is: its process is named by it
};

/// Carries out `numerics` for every rank of its mesh, with the shards' own shapes, in one forked
/// process.
///
/// It uses the model, the loss and the optimizer that reference and subjects share, and no code of
/// src/subjects/parallel or src/core/comm. The trace has all ranks of the mesh.
/// Errors        InfrastructureError that says how the process failed, also for numerics
///               that cannot be carried out; UsageError and FileError of the case before it starts.
/// Determinism   bit-equal between calls on one machine; equal to the subject's run where the
///               numerics are right.
[[nodiscard]] Trace emulate(const Case& c, const NumericsSpec& numerics,
                            const EmulationOptions& options = {});

/// emulate() beside what the caller does meanwhile: the process runs from the constructor on.
/// Errors   the constructor UsageError and FileError of the case, wait() the others of emulate().
class RunningEmulation {
 public:
  RunningEmulation(const Case& c, const NumericsSpec& numerics, const EmulationOptions& options);
  /// Called once.
  [[nodiscard]] Trace wait();

 private:
  std::string slug_;
  RunningRecord run_;
};

/// What the numerics call replicated must come out equal: a reduction that they lack shows here.
/// Errors   InfrastructureError that names the first tensor whose copies differ between emulated
///          ranks: the numerics are wrong then.
void require_equal_copies(const Trace& emulated);

/// An emulated run, of which everything was kept, as a reference: put together to one process's
/// trace. Judge runs against it with Level::kExact.   Errors   as require_equal_copies.
[[nodiscard]] Reference reference_of_emulated(const Trace& trace);

/// reference_of_emulated(emulate(c, numerics)).
[[nodiscard]] Reference make_emulated_reference(const Case& c, const NumericsSpec& numerics);

}  // namespace isoshard
