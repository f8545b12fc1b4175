// SPDX-License-Identifier: Apache-2.0
/// What comparing a run with its reference says, and why.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/evidence/evidence.h"
#include "harness/ids/cause.h"
#include "harness/ids/finding.h"
#include "harness/ids/rule.h"
#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"
#include "harness/trace/stage.h"
#include "harness/verdict/published.h"

namespace isoshard {

enum class Status : std::uint8_t { kConforms, kDiverges, kIncomplete, kVacuous };
[[nodiscard]] std::string_view name_of(Status status) noexcept;

/// How much a run that conforms has shown. kExact: every bit is that of its declared arithmetic,
/// which is within bounds, or of a reference that leaves no tolerance. kWithinTolerance: its errors
/// are no larger than allowed. kNone: it does not conform.
enum class Strength : std::uint8_t { kNone, kWithinTolerance, kExact };
/// none, within tolerance, exact.
[[nodiscard]] std::string_view name_of(Strength strength) noexcept;

/// What a comparison would have said to a copy of the reference that is rolled by one place and
/// otherwise right.
enum class ShiftedCopy : std::uint8_t {
  kRejected,
  /// The copy is right to within the roundings of a response, times what is allowed: nothing to
  /// reject.
  kFlat,
  kPassed,  ///< a wrong tensor would have passed
};
[[nodiscard]] std::string_view name_of(ShiftedCopy copy) noexcept;  ///< rejected, flat, passed

/// How one tensor, put together from all ranks, compares.
struct TensorComparison {
  RecordKey key;
  Stage stage = Stage::kForward;
  Level level = Level::kPerturbed;
  /// Over distinct parts, each once (of copies that differ, the one farthest from the reference).
  Stats stats;
  double allowed_relative_error = 0;
  double allowed_scale_error = 0;
  /// For insensitive tensors: largest allowed Frobenius norm of the difference.
  double allowed_absolute = 0;
  bool insensitive = false;  ///< reference norm below its own absolute response
  bool subnormal = false;    ///< below the least normal number; never set in fp16
  /// The smallest scale error that would have been rejected; 0 at level exact.
  double scale_sensitivity = 0;
  double rolled_error = 0;  ///< relative error of a copy rolled by one place; 0 at level exact
  ShiftedCopy rolled_copy = ShiftedCopy::kRejected;
  /// Why the comparison shows too little (harness/verdict/sensitivity.h); empty if it shows enough.
  std::string weakness;
  /// Share of elements that are compared or must be the reference's (parameters after an Adam
  /// step).
  double unmasked_share = 1;
  std::int64_t elements = 0;  ///< of the whole tensor
  bool sharded = false;       ///< some rank held less than the whole
  int ranks = 0;              ///< that hold a part
  bool within = true;
  /// Of scalars (at most 64 numbers), put together from all ranks.
  std::vector<double> reference_values, actual_values;
};

/// Which tensors of a step are pooled (harness/verdict/pooled.h).
enum class PoolOf : std::uint8_t {
  kAll,     ///< all of a kind
  kLayer,   ///< of one layer
  kClass,   ///< of one name but for its layer's number
  kRank,    ///< what one rank holds of all of a kind
  kTensor,  ///< one tensor, or one number
};
[[nodiscard]] std::string_view name_of(PoolOf pool) noexcept;

/// The values of a statistic that a correct run may have, both ends among them.
struct AllowedRange {
  double least = 0, most = 0;

  /// A NaN is never within.
  [[nodiscard]] bool holds(double value) const noexcept { return value >= least && value <= most; }
  /// The part of the allowed error that is used: 0 in the middle, 1 at both ends, more outside.
  [[nodiscard]] double used_by(double value) const noexcept;
};

/// The best-fit scale and the shift of several tensors together, against what redrawn runs of the
/// reference show.
struct PooledComparison {
  PoolOf pool = PoolOf::kAll;
  std::string name;  ///< "all gradients", "gradients of k_proj.bias", "gradients on rank 3"
  RecordKey first;   ///< the pool's first tensor in execution order
  Stage stage = Stage::kForward;
  std::int64_t tensors = 0;
  double scale = 1;  ///< the one factor that fits all of them best
  AllowedRange allowed_scale{1, 1};
  /// Mean difference, in units of each tensor's root mean square.
  double shift = 0;
  AllowedRange allowed_shift;
  int runs = 0;  ///< redrawn runs that recorded it
  bool within = true;

  /// The smallest error of a common factor of this run that would have been found, in either
  /// direction.
  [[nodiscard]] double least_found() const noexcept;
};

/// One thing that is wrong. Findings are sorted: the first is the first divergent tensor in
/// execution order.
struct Finding {
  RecordKey key;
  Stage stage = Stage::kForward;
  FindingId id = FindingId::kNone;
  NamedValues values;    ///< what the finding says: axes over which copies differ
  NamedValues measured;  ///< what shows it: errors and what is allowed, the first bad element
  /// Its place, and the id's text with `values`: "forward at model.embed_tokens: copies differ
  /// over tp".
  std::string what;
  std::string evidence;  ///< the id's other text with `measured`
  Cause cause;           ///< the likely one; none if no pattern fits
  /// The cause in words, with its tensor and what is around it; empty if no pattern fits.
  std::string diagnosis;
  /// What `diagnosis` ends with: "; forward right". Empty if it says nothing of the forward pass.
  std::string forward_words;
  std::vector<int> ranks;  ///< where it shows; the first one is the first rank to diverge
  bool confirmed = false;  ///< the controller repeated the comparison on the kept bytes
  /// FILE:LINE of the script's call that made the tensor, as the judged run recorded it; may be
  /// empty.
  std::string call_site = {};
};

/// A finding at a record; its stage is that of the record.
[[nodiscard]] Finding make_finding(const RecordKey& key, FindingId id, NamedValues values = {},
                                   NamedValues measured = {});
/// One whose place is not a single record, "gradients of k_proj.bias (step 0)"; empty: no place.
[[nodiscard]] Finding make_finding(const RecordKey& key, std::string_view place, FindingId id,
                                   NamedValues values = {}, NamedValues measured = {});

/// How much of a run masks and noise left to judge.
struct JudgedShare {
  /// Of the elements of parameters (and masters) after steps under a mask: those that are compared
  /// or must be the reference's. 1 where nothing is masked.
  double of_steps = 1;
  double least = 1;          ///< of one such tensor
  std::string least_tensor;  ///< "parameter after step w (step 0)"; empty where nothing is masked
  std::int64_t insensitive = 0;  ///< tensors that are judged by their absolute error alone
  /// Of the elements of all gradients of parameters those in insensitive tensors; the largest over
  /// steps.
  double insensitive_gradients = 0;
};

/// What shows that a run uses an axis of its mesh.
struct AxisWitness {
  Axis axis = Axis::kDp;
  int degree = 1;
  std::string tensor = {};  ///< "forward at embed_tokens (step 0)"; empty: nothing shows it
  /// The first two coordinates that hold the same of every tensor, if there are any.
  std::optional<std::pair<int, int>> alike = std::nullopt;
  /// Whether a run without one is vacuous: unless the policy excuses the axis, or the axis splits
  /// the batch and the run recorded nothing of samples.
  bool is_demanded = true;
};

/// Whether a tensor is zero on both sides, and so no evidence of anything.
[[nodiscard]] bool is_zero(const TensorComparison& comparison) noexcept;

struct Verdict {
  Status status = Status::kVacuous;
  Strength strength = Strength::kNone;  ///< of one that conforms
  std::string subject, case_slug;
  /// The system that the subject is a copy of, "DeepSpeed AutoTP"; empty: not said.
  std::string copy_of;
  MeshShape mesh;
  std::vector<AxisWitness> witnesses;  ///< one for each axis of degree > 1
  /// Tensors that are zero on both sides; parameters that have one value everywhere whenever a
  /// recorded forward pass reads them (harness/judge/rules/no_evidence.h).
  std::vector<std::string> zero_tensors, constant_parameters;
  std::vector<TensorComparison> tensors;  ///< by step, stage and execution order
  /// Of 16-bit runs whose reference has redrawn runs; else empty.
  std::vector<PooledComparison> pools;
  /// "scale errors below 0.2 % in all gradients, 2.1 % in k_proj.bias": the smallest errors that
  /// would have been rejected (harness/verdict/would_miss.h); empty if nothing was judged.
  std::string would_miss;
  std::vector<Finding> findings;
  /// Records only in the reference, only in the run; all listed.
  std::vector<std::string> missing, extra;
  /// Records of the reference that no rank has and that need not be there
  /// (JudgePolicy::not_recorded); all listed.
  std::vector<std::string> not_recorded;
  /// What was allowed to this run, or is not known of it, one sentence each: a verdict is worth
  /// less with them.
  std::vector<std::string> notes;
  /// The published bounds that apply to what was compared.
  std::vector<PublishedBound> published;
  std::int64_t compared = 0;  ///< tensors compared
  /// Nothing was compared from some step on, as whether it overflows depends on roundings.
  bool parted = false;
  /// Gradients of steps that the reference skipped, with infinities or NaNs: not judged
  /// (docs/internals/tolerances.md).
  std::int64_t skipped = 0;
  std::int64_t weak = 0;  ///< of them, those that show too little (TensorComparison::weakness)
  bool shows_too_little = false;  ///< vacuous, and for these alone
  /// What the comparisons at level perturbed left out (harness/verdict/judged_share.h).
  JudgedShare judged;
  /// Tensors that equal the emulation of the declared arithmetic bit by bit, where that was asked
  /// (verdict_through_record).
  std::optional<std::int64_t> equal_to_emulation;
  /// Which collectives were judged, or why none were, in words; empty where it was not asked.
  std::string collectives;
  int runs = 1;  ///< of the subject that were made for it; unless it says otherwise, all bit-equal
  std::string reason;  ///< one line for the verdict line
  Rule rule;           ///< by which it is vacuous or incomplete; none for other verdicts
  Evidence evidence;   ///< for reports
};

/// The rule that a run breaks if an axis has no witness; none if each axis that needs one has it.
[[nodiscard]] Rule rule_of_unused_axis(const std::vector<AxisWitness>& witnesses);

/// Makes a verdict one that diverges, whatever it was; its reason and findings are the caller's.
void set_diverges(Verdict& verdict);

/// "exact: equal to its declared arithmetic, which is within bounds", "exact: equal to its
/// reference bit by bit", "within tolerance"; empty for a verdict that does not conform.
[[nodiscard]] std::string_view words_of_strength(const Verdict& verdict) noexcept;

/// Why a run diverges whose first finding this is: "first gradient of w (step 0): differs from the
/// reference on ranks 0, 1; gradient of w: scale 2 = dp".
[[nodiscard]] std::string words_of_first(const Finding& first, const MeshShape& mesh);

/// How a verdict line begins: "CONFORMS (within tolerance)", "DIVERGES".
[[nodiscard]] std::string words_of_verdict(const Verdict& verdict);

/// The verdict on a run that equals the emulation of its declared arithmetic, from that on the
/// emulation: all its numbers are the run's own, and `witnesses` are those of the run. Comparisons
/// that show too little do not make it vacuous: any other bits were rejected. An axis without a
/// witness does.
///
/// `emulation` judges the emulated run against the plain reference; `num_equal` tensors of the run
/// equal the emulated ones, and none differs.
[[nodiscard]] Verdict verdict_through_record(Verdict emulation, std::int64_t num_equal);

}  // namespace isoshard
