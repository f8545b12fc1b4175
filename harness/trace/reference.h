// SPDX-License-Identifier: Apache-2.0
/// The trusted run and how far it moves when its weights move by one ulp: what every comparison is
/// made against.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/stats/response.h"
#include "harness/trace/redrawn.h"
#include "harness/trace/trace.h"

namespace isoshard {

/// Whether a record of the step in which two trainings part, or a later one, shows their difference
/// and nothing else: what follows from skipping the step. Their gradients are comparable where both
/// are finite.
[[nodiscard]] bool follows_parting(const RecordKey& key, int step) noexcept;

/// A single-process trace with every record kept, plus responses. Shared memory: copying a
/// Reference copies no tensors, and ranks forked later read it in place.
class Reference {
 public:
  Reference() = default;
  /// Errors   MeshError if trace.mesh is not a world of one; VacuousError if a record was not kept
  ///          or there is none.
  explicit Reference(Trace trace);
  [[nodiscard]] const Trace& trace() const noexcept;
  /// Of a mask that is drawn again in backward that of its first draw: a reference recomputes
  /// nothing. nullptr: there is none.
  [[nodiscard]] const Record* find(const RecordKey& key) const;
  /// The activation gradient that a step's backward pass computes first, but for the loss's own;
  /// nullptr: none is recorded.
  [[nodiscard]] const Record* begin_of_backward(int step) const noexcept;
  [[nodiscard]] HostTensor tensor(const RecordKey& key) const;
  [[nodiscard]] const std::byte* bytes(const Record& record) const;
  /// Lets the bytes of all tensors go, for this object and its copies; records and responses stay.
  void discard_bytes();
  [[nodiscard]] bool has_bytes() const noexcept;

  /// The first step in which the gradients of `run` are not finite and those of the reference are,
  /// or the other way round, as its "found_inf" says; empty: there is none, or its ranks differ in
  /// it, or its gradients show something else. One of the two skips that step, so they are
  /// different trainings from there on.
  [[nodiscard]] std::optional<int> parting_step(const Trace& run) const;
  /// Whether a correct run may part from the reference in that step: a response run or a variant
  /// did, or the reference does not overflow there and one of the fp16 gradients that are not
  /// finite in `run` is in the reference, in units of those of `run`, within a factor of 4 of the
  /// largest number: pieces of a sum that ranks add may be that much larger than it.
  [[nodiscard]] bool may_part(const Trace& run, int step) const;

  /// Widens the responses by one perturbed run (a Trace whose parts were compared with this
  /// reference), up to the step in which the two part.
  void add_response(const Trace& perturbed);
  /// The same by a run that legally differs otherwise; it counts as none of response_runs().
  void add_variant(const Trace& variant);
  /// nullptr when no perturbed run has been added.
  [[nodiscard]] const Response* response(const RecordKey& key) const;
  [[nodiscard]] int response_runs() const noexcept;
  [[nodiscard]] const std::map<RecordKey, Response>& responses() const noexcept;
  /// For responses that were stored with a bundle.
  void set_responses(std::map<RecordKey, Response> responses, int runs);

  /// Adds a run whose roundings alone were drawn anew (a Trace whose parts were compared with this
  /// reference), up to the step in which the two part. Masked records, and those that are not
  /// finite everywhere, are left out.
  void add_redrawn(const Trace& run);
  [[nodiscard]] const Redrawn& redrawn() const noexcept;
  /// For those that were stored with a bundle.
  void set_redrawn(Redrawn redrawn);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isoshard
