// SPDX-License-Identifier: Apache-2.0
/// Judges a case the whole way: makes the references that are asked for, runs the subject, and says
/// one verdict.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/report/tables.h"
#include "harness/trace/reference.h"
#include "harness/verdict/verdict.h"
#include "harness/verify/subject_runs.h"
#include "subjects/parallel/numerics_spec.h"
#include "suite/record/run_case.h"
#include "suite/verify/case_judgement.h"
#include "suite/verify/side_by_side.h"
#include "suite/verify/verify_observer.h"

namespace isoshard {

/// How much of the runs is kept. kLean: a plain reference that holds an emulated run only has one
/// response, and the others when that was not enough: the tolerance is the largest over all, so
/// fewer never pass more. The emulated run and the subject's leave digests, not tensors, as long as
/// they are equal. kWhole: three responses from the start, and every trace whole.
enum class Retention : std::uint8_t { kLean, kWhole };

/// How cases are judged, as data. Each member may be left as it is.
struct JudgePlan {
  ReferenceKind reference = ReferenceKind::kAuto;
  std::string fault = {};  ///< the id of a fault to inject into the subject's runs; empty: none
  bool tables = false;     ///< put the runs side by side
  bool times = false;      ///< measure the collectives of the subject's first run
  /// A run that diverges is what is asked for. So it is compared with the plain reference first,
  /// and its declared arithmetic is carried out only where that decides: in 16 bits, or where it
  /// does not diverge. The verdict is the same, of fewer runs.
  bool expects_divergence = false;
  Retention retention = Retention::kLean;
  /// At least so many runs of the subject a verdict, each equal to the first one bit by bit. From
  /// the second on ranks are delayed at random before collectives (harness/fault/random_delays.h),
  /// so that a race comes out another way. A verdict that needs more runs holds them to the first
  /// one, too.
  int repeat = 1;
  /// For test doubles under `run`: their ranks make other calls than the subject declares, which no
  /// plain verdict holds against them.
  bool makes_own_calls = false;
  RunOptions run = {};  ///< test doubles and what to keep, of every run of the subject
  /// For kBoth: the declared arithmetic, if it is not to be numerics_of.
  std::function<NumericsSpec(const Case&)> numerics = {};
};

/// Whether a fault is a legal variation, which need not make the calls that its subject declares.
/// Errors   as find_fault.
[[nodiscard]] bool is_benign_variation(const std::string& fault);

/// Whether memory has room for the plain references of both at once.
[[nodiscard]] bool references_fit_together(const Case& a, const Case& b);

/// Keeps the plain references that the case at hand and later announced ones need: cases that share
/// one should be neighbors, unless the references fit together.
class CaseJudge {
 public:
  /// Errors   UsageError for an unknown fault.
  explicit CaseJudge(JudgePlan plan);
  /// Requires   the observer outlives the judge.
  CaseJudge(JudgePlan plan, VerifyObserver& observer);

  /// The cases that will be judged, in this order. While memory lasts, the plain reference of the
  /// next one is made beside that of the one at hand: each is one process on one core.
  void announce(std::vector<Case> cases);
  /// From the next case on this fault is injected; empty: none.
  /// Errors   UsageError for an unknown one.
  void inject(std::string fault);

  /// Against kBoth the verdict on a run that equals its emulation is that on the emulation
  /// (verdict_through_record). A run that does not diverges, whatever follows. It is judged against
  /// the plain reference, too, whose findings say more: they count if they are findings, but in 16
  /// bits, where a tolerance hides what came first, those of the exact comparison do if they begin
  /// earlier. A run whose record cannot be carried out is judged against the plain reference; only
  /// if it conforms is that an error.
  ///
  /// All runs of the subject that a verdict takes must be one run, bit by bit: if they are not it
  /// diverges as not repeatable.
  ///
  /// Errors   as make_reference, emulate and run_case; UsageError for kEmulated and kBoth of a case
  ///          that declares no arithmetic; InfrastructureError if the fault had no effect, or if
  ///          two runs of a reference or of an emulation differ.
  [[nodiscard]] CaseJudgement judge_case(const Case& item);

  /// The runs side by side; none unless the plan asks for tables.
  [[nodiscard]] std::vector<ComparisonTables> tables() const { return side_by_side_.tables(); }

 private:
  struct Plain {
    Reference reference;
    Reference redrawn = {};    ///< the same with redrawn runs; without records: not made yet
    bool is_seen = false;      ///< listeners know it
    int num_runs = 0;          ///< it was made so often
    bool is_repeated = false;  ///< and was the same, with its responses
  };
  /// Which run of the subject is asked for: one that is compared with the reference as it records,
  /// or digests of what it records. For digests the reference is the plain one, which says what is
  /// recorded and may have no bytes any more.
  enum class RunDetail : std::uint8_t { kComparison, kDigests };
  [[nodiscard]] Trace run_subject(const Case& item, const Reference& reference, RunDetail detail);
  /// The subject's run of these options, the next one of its case.
  [[nodiscard]] Trace next_run(const Case& item, const Reference& reference, RunOptions options);
  /// Runs the subject until it has run as often as the plan asks.
  void repeat_runs(const Case& item);
  [[nodiscard]] CaseJudgement judged(const Case& item);
  [[nodiscard]] std::vector<Case>::const_iterator announced(const Case& item) const;
  /// Lets go of the plain references that neither `item` nor a later announced case is judged
  /// against.
  void keep_needed_plains(const Case& item);
  Reference& plain(const Case& item, int responses);
  void make_plain(const Case& item, int responses);
  /// What the plain reference recorded; its bytes are let go if no other announced case needs them.
  const Reference& plain_records(const Case& item);
  /// The same with redrawn runs, which no later verdict of another case sees.
  const Reference& plain_with_redrawn(const Case& item);
  [[nodiscard]] CaseJudgement against_plain(const Case& item);
  [[nodiscard]] JudgePolicy plain_policy_of(const Case& item) const;
  [[nodiscard]] CaseJudgement against_emulated(const Case& item);
  [[nodiscard]] CaseJudgement against_both(const Case& item);
  /// Of a run that is expected to diverge (JudgePlan::expects_divergence).
  [[nodiscard]] CaseJudgement against_plain_first(const Case& item);
  [[nodiscard]] CaseJudgement against_both_or_plain(const Case& item);
  /// The emulated run with all that it recorded; kept where several announced cases have its slug.
  [[nodiscard]] Trace emulated_whole(const Case& item);
  /// The verdict on a run that is as emulated, from that on the emulation. Where bounds were too
  /// wide to show something, one wrong run of the trusted side may have made them so: it runs
  /// again. Errors   as require_repeatable_plain.
  [[nodiscard]] CaseJudgement as_emulated(const Case& item, Verdict record, std::int64_t num_equal);
  /// Makes the plain reference and its perturbed runs once more.
  /// Errors   InfrastructureError if they are not the same bit by bit.
  void require_repeatable_plain(const Case& item);
  /// The verdict on a subject that is not as emulated: it does not conform. `exactly` is called
  /// where the comparison with the emulated run decides.
  [[nodiscard]] CaseJudgement not_emulated(const Case& item,
                                           const std::function<Verdict()>& exactly);
  /// The same, where the verdict within tolerances is known.
  [[nodiscard]] CaseJudgement not_emulated(const Case& item, CaseJudgement within,
                                           const std::function<Verdict()>& exactly);
  /// The verdict on the emulated run against the plain one, and that run. `meanwhile` is called
  /// once, while it runs.
  [[nodiscard]] std::pair<Verdict, Trace> on_record(const Case& item, const NumericsSpec& numerics,
                                                    const std::function<void()>& meanwhile);
  /// The emulated run; not the first one of a case must be the first one again.
  [[nodiscard]] Trace emulated_again(const Case& item, const NumericsSpec& numerics,
                                     const Trace& first);
  /// The verdict on the subject's run against the emulated one, with no tolerance. It conforms only
  /// if every bit is the same.
  [[nodiscard]] Verdict exact(const Case& item, Trace emulated);

  JudgePlan plan_;
  VerifyObserver nobody_;
  VerifyObserver* observer_;
  SideBySide side_by_side_;
  std::vector<Case> announced_;
  std::map<std::string, Plain> plains_;    ///< by reference_slug
  std::map<std::string, Trace> emulated_;  ///< emulated_whole, by slug
  // Of the case at hand:
  SubjectRuns runs_;
  std::vector<ReportCollective> collective_times_;
  int num_emulations_ = 0;
};

}  // namespace isoshard
