// SPDX-License-Identifier: Apache-2.0
/// Judges a case the whole way: makes the references that are asked for, runs the subject, and says one verdict.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "fixtures/cases/case.h"
#include "harness/compare/verdict.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// What a run is judged against. kPlain: the unsharded process, within its own response to one-ulp changes. kEmulated: the subject's
/// declared arithmetic carried out in one process, bit by bit. kBoth: that, and the emulated run against the plain one. kAuto: kBoth
/// for a subject that declares its arithmetic, kPlain for others and for lattice models, which are equal to the plain one.
enum class ReferenceKind : std::uint8_t { kAuto, kPlain, kEmulated, kBoth };
[[nodiscard]] std::string_view name_of(ReferenceKind kind) noexcept;  ///< auto, plain, emulated, both

struct CaseJudgement {
  Verdict verdict;
  ReferenceKind against = ReferenceKind::kPlain;  ///< what the verdict was made against, never kAuto
};

/// Keeps the plain reference of the last case: cases that share it should be neighbours.
class CaseJudge {
 public:
  /// Each may be empty but run.
  struct Hooks {
    std::function<Trace(const Case&, const Reference&)> run;              ///< runs the subject; may be asked twice
    std::function<void(const Case&, const Reference&)> on_plain = {};     ///< a plain reference was made
    std::function<void(const Case&, const Reference&)> on_emulated = {};  ///< an emulated one was made
  };
  /// With `all_responses` a plain reference has its three responses from the start; else, where it holds an emulated run only, the
  /// first alone, and the others when that was not enough: the tolerance is the largest over all, so fewer never pass more.
  CaseJudge(ReferenceKind kind, Hooks hooks, bool all_responses = false);

  /// Against kBoth the verdict on a run that equals its emulation is that on the emulation (verdict_through_record). A run that does
  /// not is judged against the plain reference, whose findings say more; if it conforms to that, the verdict is the exact one.
  ///
  /// Errors   as make_reference, emulate and the hook; UsageError for kEmulated and kBoth of a case that declares no arithmetic.
  [[nodiscard]] CaseJudgement judge_case(const Case& item);

 private:
  const Reference& plain(const Case& item, int responses);
  [[nodiscard]] CaseJudgement against_plain(const Case& item);
  [[nodiscard]] CaseJudgement against_emulated(const Case& item);
  [[nodiscard]] CaseJudgement against_both(const Case& item);
  [[nodiscard]] Verdict exact(const Case& item, Trace emulated);

  ReferenceKind kind_;
  Hooks hooks_;
  int first_responses_;
  Reference plain_;
  std::string slug_;
};

}  // namespace isoshard
