// SPDX-License-Identifier: Apache-2.0
/// The runs of a subject that one verdict is made of: every later one must be the first one again,
/// bit by bit.
#pragma once
#include <optional>
#include <string_view>

#include "harness/trace/trace.h"
#include "harness/verdict/equal_runs.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// What a run recorded, without the bytes that it kept: enough for equality_of.
[[nodiscard]] Trace without_bytes(const Trace& run);

/// Holds the digests of the first run, and holds each later one to them.
class SubjectRuns {
 public:
  struct Difference {
    int run = 0;  ///< the number of the run that is not like run 1
    RunDifference from_first;
  };

  /// How many there were.
  [[nodiscard]] int num_runs() const noexcept { return num_runs_; }
  void add(const Trace& run);
  /// Of the first run that was not like the first one; nothing while all are.
  [[nodiscard]] const std::optional<Difference>& difference() const noexcept { return difference_; }
  /// The first run differs from the emulated one; said where runs differ from each other.
  void first_is_not_emulated(const RunDifference& where) { not_emulated_ = where; }

  /// Whatever `verdict` says: if the runs differ it diverges as not repeatable, and its first
  /// finding names the first tensor and rank in which they do. Also writes down how many runs there
  /// were.
  void settle(Verdict& verdict) const;

 private:
  int num_runs_ = 0;
  Trace first_;
  std::optional<Difference> difference_;
  std::optional<RunDifference> not_emulated_;
};

/// Makes `verdict` one that diverges at `where`, for a run whose values equal those of the emulated
/// reference where its bits do not.
void diverge_in_bits(Verdict& verdict, const RunDifference& where);

/// Whether both diverge, first at the same tensor.
[[nodiscard]] bool name_same_tensor(const Verdict& a, const Verdict& b);

/// The verdict where a run diverges from the emulated reference at an earlier tensor than from the
/// plain one: the findings of `exact`. Where the first of these has no cause, with the cause that
/// `within` names, but for what it says of the forward pass.
[[nodiscard]] Verdict with_cause_of(Verdict exact, const Verdict& within);

}  // namespace isoshard
