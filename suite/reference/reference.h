// SPDX-License-Identifier: Apache-2.0
/// The trusted run of a case: one plain process, and how far it moves when its weights move by one
/// ulp.
#pragma once
#include <chrono>
#include <cstddef>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/trace/reference.h"

namespace isoshard {

struct ReferenceOptions {
  /// Perturbed runs; with more than one also variants (add_responses).
  int responses = 3;
  std::chrono::milliseconds deadline{0};  ///< for each run; 0: the case's (case_deadline)
  /// The how-manieth reference of its case it is: its process is named by it
  int number = 1;
};

/// Runs the case unsharded, the global batch in one forward, and then its perturbed runs, as many
/// at once as there are cores.
///
/// A lattice case has no perturbed runs: its subjects must be equal to it. Every run is a forked
/// world of one, so the calling process computes nothing and stays small; tensors are in shared
/// memory.
/// Errors        InfrastructureError that says how a run failed; as require_exact; UsageError and
///               FileError of the case before any run
/// starts. Determinism   bit-equal between calls on one machine.
[[nodiscard]] Reference make_reference(const Case& c, const ReferenceOptions& options = {});
/// The same of several cases, whose runs share the cores.
[[nodiscard]] std::vector<Reference> make_references(const std::vector<Case>& cases,
                                                     const ReferenceOptions& options = {});

/// Runs as many more perturbed runs as `reference`, made of the same case, lacks to `responses`:
/// run by run those of make_reference. With more than one, of a case with dp > 1, also a regrouped
/// run, and in fp16 a scaled one (plain_run.h): gradients and what follows from them move by these,
/// too.
void add_responses(const Case& c, Reference& reference, int responses,
                   std::chrono::milliseconds deadline = std::chrono::milliseconds(0));

/// make_reference with default options, computed once per process for cases of equal
/// reference_slug().
[[nodiscard]] const Reference& reference_of(const Case& c);

/// Forgets what reference_of keeps (its shared memory is freed when no copy is left).
void forget_references();

/// About the bytes that the records of a plain run take, rather too many than too few.
[[nodiscard]] std::size_t trace_bytes(const Case& c);

/// Bytes that the records of one step of one unsharded run may take, times the steps, generously:
/// the capacity of an arena.
[[nodiscard]] std::size_t trace_capacity(const Case& c);

}  // namespace isoshard
