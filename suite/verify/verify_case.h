// SPDX-License-Identifier: Apache-2.0
/// Judges a case the whole way: makes the references that are asked for, runs the subject, and says
/// one verdict.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/trace/reference.h"
#include "harness/verdict/verdict.h"
#include "subjects/parallel/numerics_spec.h"

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
};

/// What is asked of a run of the subject: to be compared with the reference as it records, or
/// digests of what it records. Then the reference is the plain one, for who wants to know what is
/// recorded, and may have no bytes any more.
enum class RunDetail : std::uint8_t { kComparison, kDigests };

/// Whether memory has room for the plain references of both at once.
[[nodiscard]] bool references_fit_together(const Case& a, const Case& b);

/// Keeps the plain references that the case at hand and later announced ones need: cases that share
/// one should be neighbors, unless the references fit together.
class CaseJudge {
 public:
  /// Each may be empty but run.
  struct Hooks {
    /// Runs the subject; may be asked again.
    std::function<Trace(const Case&, const Reference&, RunDetail)> run;
    /// A plain reference was made.
    std::function<void(const Case&, const Reference&)> on_plain = {};
    /// An emulated one was made.
    std::function<void(const Case&, const Reference&)> on_emulated = {};
    /// For kBoth: the declared arithmetic, if it is not to be numerics_of
    std::function<NumericsSpec(const Case&)> record = {};
  };
  /// kLean: a plain reference that holds an emulated run only has one response, and the others when
  /// that was not enough: the tolerance is the largest over all, so fewer never pass more. The
  /// emulated run and the subject's leave digests, not tensors, as long as they are equal. kWhole:
  /// three responses from the start, and every trace whole.
  enum class Retention : std::uint8_t { kLean, kWhole };
  CaseJudge(ReferenceKind kind, Hooks hooks, Retention effort = Retention::kLean);

  /// The cases that will be judged, in this order. While memory lasts, the plain reference of the
  /// next one is made beside that of the one at hand: each is one process on one core.
  void announce(std::vector<Case> cases);

  /// Against kBoth the verdict on a run that equals its emulation is that on the emulation
  /// (verdict_through_record). A run that does not is judged against the plain reference, whose
  /// findings say more; if it conforms to that, the verdict is the exact one. So is a run whose
  /// record cannot be carried out; only if it conforms is that an error.
  ///
  /// Errors   as make_reference, emulate and the hook; UsageError for kEmulated and kBoth of a case
  ///          that declares no arithmetic.
  [[nodiscard]] CaseJudgement judge_case(const Case& item);

 private:
  struct Plain {
    Reference reference;
    bool is_seen = false;  ///< on_plain was called
  };
  [[nodiscard]] std::vector<Case>::const_iterator announced(const Case& item) const;
  /// Lets go of the plain references that neither `item` nor a later announced case is judged
  /// against.
  void keep_needed_plains(const Case& item);
  Reference& plain(const Case& item, int responses);
  void make_plain(const Case& item, int responses);
  /// What the plain reference recorded; its bytes are let go if no other announced case needs them.
  const Reference& plain_records(const Case& item);
  [[nodiscard]] CaseJudgement against_plain(const Case& item);
  [[nodiscard]] CaseJudgement against_emulated(const Case& item);
  [[nodiscard]] CaseJudgement against_both(const Case& item);
  [[nodiscard]] CaseJudgement against_both_or_plain(const Case& item);
  /// The verdict on the emulated run against the plain one, and that run. `meanwhile` is called
  /// once, while it runs.
  [[nodiscard]] std::pair<Verdict, Trace> on_record(const Case& item, const NumericsSpec& numerics,
                                                    const std::function<void()>& meanwhile);
  /// The verdict on the subject's run against the emulated one, with no tolerance.
  [[nodiscard]] Verdict exact(const Case& item, Trace emulated);

  ReferenceKind kind_;
  Hooks hooks_;
  Retention retention_;
  std::vector<Case> announced_;
  std::map<std::string, Plain> plains_;  ///< by reference_slug
};

}  // namespace isoshard
