// SPDX-License-Identifier: Apache-2.0
/// What a case is judged against, and what that said.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "harness/report/report.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// What a run is judged against. kPlain: the unsharded process, within its own response to one-ulp
/// changes. kEmulated: the subject's declared arithmetic carried out in one process, bit by bit.
/// kBoth: that, and the emulated run against the plain one. kAuto: kBoth for a subject that
/// declares its arithmetic, kPlain for others and for lattice models, which are equal to the plain
/// one.
enum class ReferenceKind : std::uint8_t { kAuto, kPlain, kEmulated, kBoth };
/// Auto, plain, emulated, both.
[[nodiscard]] std::string_view name_of(ReferenceKind kind) noexcept;

struct CaseJudgement {
  Verdict verdict;
  /// What the verdict was made against, never kAuto.
  ReferenceKind against = ReferenceKind::kPlain;
  /// How long collectives took in the subject's first run (JudgePlan::times).
  std::vector<ReportCollective> collective_times = {};
};

}  // namespace isoshard
