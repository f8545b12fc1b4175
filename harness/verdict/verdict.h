// SPDX-License-Identifier: Apache-2.0
/// What comparing a run with its reference says, and why.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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
  /// The smallest scale error that would have been rejected; 0 at level exact.
  double scale_sensitivity = 0;
  double rolled_error = 0;  ///< relative error of a copy rolled by one place; 0 at level exact
  ShiftedCopy rolled_copy = ShiftedCopy::kRejected;
  /// Why the comparison shows too little (harness/verdict/sensitivity.h); empty if it shows enough.
  std::string weakness;
  double unmasked_share = 1;  ///< share of elements judged (parameters after an Adam step)
  bool sharded = false;       ///< some rank held less than the whole
  int ranks = 0;              ///< that hold a part
  bool within = true;
  /// Of scalars (at most 64 numbers), put together from all ranks.
  std::vector<double> reference_values, actual_values;
};

/// One thing that is wrong. Findings are sorted: the first is the first divergent tensor in
/// execution order.
struct Finding {
  RecordKey key;
  Stage stage = Stage::kForward;
  std::string what;      ///< "forward at model.embed_tokens: copies differ over tp"
  std::string evidence;  ///< numbers: error against allowed, first bad index with both values
  /// Likely cause in the words of the fault catalogue; empty if no pattern fits.
  std::string diagnosis;
  std::vector<int> ranks;  ///< where it shows; the first one is the first rank to diverge
  bool confirmed = false;  ///< the controller repeated the comparison on the kept bytes
};

struct Verdict {
  Status status = Status::kVacuous;
  Strength strength = Strength::kNone;  ///< of one that conforms
  std::string subject, case_slug;
  /// The system that the subject is a copy of, "DeepSpeed AutoTP"; empty: not said.
  std::string copy_of;
  MeshShape mesh;
  std::vector<TensorComparison> tensors;  ///< in execution order
  std::vector<Finding> findings;
  /// Records only in the reference, only in the run; all listed.
  std::vector<std::string> missing, extra;
  /// The published bounds that apply to what was compared.
  std::vector<PublishedBound> published;
  std::int64_t compared = 0;  ///< tensors compared
  /// Gradients of steps that the reference skipped, with infinities or NaNs: not judged
  /// (docs/tolerances.md).
  std::int64_t skipped = 0;
  std::int64_t weak = 0;  ///< of them, those that show too little (TensorComparison::weakness)
  bool shows_too_little = false;  ///< vacuous, and for these alone
  /// Tensors that equal the emulation of the declared arithmetic bit by bit, where that was asked
  /// (verdict_through_record).
  std::optional<std::int64_t> equal_to_emulation;
  int runs = 1;  ///< of the subject that were made for it; unless it says otherwise, all bit-equal
  std::string reason;  ///< one line for the verdict line
};

/// "exact: equal to its declared arithmetic, which is within bounds", "exact: equal to its
/// reference bit by bit", "within tolerance"; empty for a verdict that does not conform.
[[nodiscard]] std::string_view words_of_strength(const Verdict& verdict) noexcept;

/// How a verdict line begins: "CONFORMS (within tolerance)", "DIVERGES".
[[nodiscard]] std::string words_of_verdict(const Verdict& verdict);

/// The verdict on a run that equals the emulation of its declared arithmetic, from that on the
/// emulation: all its numbers are the run's own. Comparisons that show too little do not make it
/// vacuous: any other bits were rejected.
///
/// `emulation` judges the emulated run against the plain reference; `num_equal` tensors of the run
/// equal the emulated ones, and none differs.
[[nodiscard]] Verdict verdict_through_record(Verdict emulation, std::int64_t num_equal);

}  // namespace isoshard
