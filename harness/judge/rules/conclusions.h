// SPDX-License-Identifier: Apache-2.0
/// The rules that a run must keep to be judged, and those that it must keep to be a pass. Each is a
/// row of a list; the judge knows none of them. Their ids are documented in harness/ids/rule.cc
/// (`isoshard explain RULE`).
#pragma once
#include <optional>
#include <span>

#include "harness/judge/rules/judged_run.h"

namespace isoshard::detail {

/// A rule without which nothing is compared.
struct Admission {
  Status status;                                                 ///< of a run that breaks it
  Rule (*broken)(const Reference& reference, const Trace& run);  ///< none: the run keeps it
};

/// In the order in which they are tried.
[[nodiscard]] std::span<const Admission> admissions() noexcept;

/// What is known of a run when all of it was compared.
struct JudgedTensors {
  const JudgedRun& run;
  const Verdict& verdict;           ///< its comparisons and counts
  const Rule& not_judged;           ///< of the first tensor that could not be judged; or none
  std::optional<int> parting = {};  ///< the step in which the run becomes another training
};

/// A rule that a run without findings breaks, and so is vacuous.
struct Conclusion {
  Rule rule;                      ///< none: the run keeps it
  bool shows_too_little = false;  ///< Verdict::shows_too_little
};

/// The first rule that a run without findings breaks; none if it is a pass.
[[nodiscard]] Conclusion conclusion_of(const JudgedTensors& judged);

}  // namespace isoshard::detail
