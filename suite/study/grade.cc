// SPDX-License-Identifier: Apache-2.0
// Which causes name which bugs. What is not in a table is wrong.
#include "suite/study/grade.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

namespace isoshard {
namespace {

/// What a cause's values must say of the bug.
enum class Says : std::uint8_t {
  kNothing,
  kFactor,        ///< scale: 1 + magnitude
  kRootOfFactor,  ///< scale: its root
  kFactors,       ///< factors: 1 + magnitude on the ranks that go wrong, 1 on others
  kScaleZero,     ///< scale: 0
  kLargerBy,      ///< offset: above 0, as is each shift. How large it is depends on the values.
  kShiftInUnits,  ///< shift: the magnitude
  kOneZero,       ///< zeros: no more than one a rank
  kOneKept,       ///< kept: no more than one a rank
  kOneElement,    ///< first, last: the same
  kByOne,         ///< shift: one place, either way
  kToBf16,        ///< dtype
  kOverTheCall,   ///< axis: that of the collective
};

using Points = unsigned;
using Extents = unsigned;

constexpr Points bit(StudyPoint point) {
  return 1U << static_cast<unsigned>(point);
}
constexpr Extents bit(StudyExtent extent) {
  return 1U << static_cast<unsigned>(extent);
}
constexpr Points kTaps = bit(StudyPoint::kForward) | bit(StudyPoint::kBackward),
                 kCalls = bit(StudyPoint::kCollective), kValues = kTaps | kCalls,
                 kSteps = bit(StudyPoint::kUpdate), kAnyPoint = kValues | kSteps;
constexpr Extents kWhole = bit(StudyExtent::kAll), kRow = bit(StudyExtent::kPart),
                  kOne = bit(StudyExtent::kElement), kSome = kWhole | kRow, kAny = kSome | kOne;

struct RightCause {
  Points points;
  StudyChange change;
  Extents extents;
  CauseId cause;
  Says says = Says::kNothing;
  std::optional<Purpose> purpose = {};  ///< of the call; nothing: of any
};

constexpr RightCause kRightCauses[] = {
    // Of a part or an element only zeros and moved values have names.
    {kAnyPoint, StudyChange::kScale, kWhole, CauseId::kScale, Says::kFactor},
    {kAnyPoint, StudyChange::kScale, kWhole, CauseId::kScaleNearOne, Says::kFactor},
    // The factor is right; that a number of the run fits it is chance, and no claim of its own.
    {kAnyPoint, StudyChange::kScale, kWhole, CauseId::kScaleOfFormula, Says::kFactor},
    {kAnyPoint, StudyChange::kScale, kWhole, CauseId::kFactorPerRank, Says::kFactors},
    {kAnyPoint, StudyChange::kScale, kWhole, CauseId::kFactorPerRankOfFormula, Says::kFactors},
    {kCalls, StudyChange::kScale, kWhole, CauseId::kPoolMultiplied, Says::kFactor},
    // What a call gives may be recorded first in a sum with the residual stream.
    {kCalls, StudyChange::kScale, kWhole, CauseId::kSummandFactors, Says::kFactors},
    // The call has squares, the record their root.
    {kCalls, StudyChange::kScale, kWhole, CauseId::kScale, Says::kRootOfFactor, Purpose::kClipNorm},
    {kCalls, StudyChange::kScale, kWhole, CauseId::kScaleOfFormula, Says::kRootOfFactor,
     Purpose::kClipNorm},
    // A loss is one number, of which there is no part, and m of its size added scales it.
    {kCalls, StudyChange::kScale, kAny, CauseId::kScale, Says::kFactor, Purpose::kLossReduce},
    {kCalls, StudyChange::kScale, kAny, CauseId::kScaleOfFormula, Says::kFactor,
     Purpose::kLossReduce},
    {kCalls, StudyChange::kShift, kAny, CauseId::kScale, Says::kFactor, Purpose::kLossReduce},
    {kCalls, StudyChange::kShift, kAny, CauseId::kScaleOfFormula, Says::kFactor,
     Purpose::kLossReduce},

    {kAnyPoint, StudyChange::kShift, kWhole, CauseId::kConstantOffset, Says::kLargerBy},
    {kCalls, StudyChange::kShift, kWhole, CauseId::kPoolShifted, Says::kShiftInUnits},

    {kValues, StudyChange::kZero, kSome, CauseId::kZeros},
    {kValues, StudyChange::kZero, kOne, CauseId::kZeros, Says::kOneZero},
    {kValues, StudyChange::kZero, kWhole, CauseId::kScale, Says::kScaleZero},
    // No record tells a gradient of zeros from one that was never made.
    {bit(StudyPoint::kBackward), StudyChange::kZero, kWhole, CauseId::kOutputDetached},
    // A step of zeros leaves the parameter as it was: all of it, or what the rank has of it.
    {kSteps, StudyChange::kZero, kWhole, CauseId::kNotUpdated},
    {kSteps, StudyChange::kZero, kWhole, CauseId::kAsBeforeStep},
    {kSteps, StudyChange::kZero, kAny, CauseId::kRowsNotUpdated},
    {kSteps, StudyChange::kZero, kSome, CauseId::kColumnsNotUpdated},
    {kSteps, StudyChange::kZero, kSome, CauseId::kRunNotUpdated},
    {kSteps, StudyChange::kZero, kOne, CauseId::kRunNotUpdated, Says::kOneElement},
    {kSteps, StudyChange::kZero, kSome, CauseId::kElementsNotUpdated},
    {kSteps, StudyChange::kZero, kOne, CauseId::kElementsNotUpdated, Says::kOneKept},

    {kValues, StudyChange::kRoll, kSome, CauseId::kSlicesShifted, Says::kByOne},
    {kValues, StudyChange::kRoll, kSome, CauseId::kSlicesPermuted},
    {kValues, StudyChange::kRoll, kSome, CauseId::kSameValuesElsewhere},

    {kValues, StudyChange::kRound, kWhole, CauseId::kRounded, Says::kToBf16},
    {kCalls, StudyChange::kRound, kWhole, CauseId::kExponentialsRounded, Says::kToBf16,
     Purpose::kVocabParallelLogsumexp},

    {kCalls, StudyChange::kSkip, kWhole, CauseId::kRankLocalPartial, Says::kOverTheCall},
    {kCalls, StudyChange::kSkip, kWhole, CauseId::kRankLocal, Says::kOverTheCall},
    {kCalls, StudyChange::kSkip, kWhole, CauseId::kPiecesRankLocal, Says::kOverTheCall},
    {kCalls, StudyChange::kSkip, kWhole, CauseId::kNoCallAlongAxis, Says::kOverTheCall},
    {kCalls, StudyChange::kSkip, kWhole, CauseId::kSquaresNotSummed, Says::kOverTheCall,
     Purpose::kClipNorm},
    {kCalls, StudyChange::kSkip, kWhole, CauseId::kNormOfOneRank, Says::kOverTheCall,
     Purpose::kClipNorm},
    {kCalls, StudyChange::kSkip, kWhole, CauseId::kOwnLargestLogit, Says::kNothing,
     Purpose::kVocabParallelMax},
    {kCalls, StudyChange::kSkip, kWhole, CauseId::kSoftmaxOfOwnColumns, Says::kNothing,
     Purpose::kVocabParallelLogsumexp},
};

/// They say where copies or values differ, or how values look, and not what was done to them.
constexpr std::array kTellThePlace = {
    CauseId::kCopiesDiffer,  CauseId::kPartNotReached,     CauseId::kNotFinite,
    CauseId::kNotSlices,     CauseId::kLogitRowsNotZero,   CauseId::kRightAtEndOfStep,
    CauseId::kReceivedOther, CauseId::kWrongBetweenStages, CauseId::kWrongWithForeignKeys,
    CauseId::kSameRowAdded,
};

bool says_word(const Cause& cause, std::string_view name, std::string_view word) {
  const IdValue* const value = find_value(cause.values, name);
  const auto* const text = value == nullptr ? nullptr : std::get_if<std::string>(value);
  return text != nullptr && *text == word;
}

/// Whether the number shows the magnitude with an error of at most a tenth.
bool shows(double difference, double magnitude) {
  return std::fabs(difference - magnitude) <= 0.1 * magnitude;
}

bool says_factors(const Cause& cause, const Composition& c) {
  const IdValue* const value = find_value(cause.values, "factors");
  const auto* const factors = value == nullptr ? nullptr : std::get_if<std::vector<double>>(value);
  if (factors == nullptr) return false;
  const auto is_right = [](double factor) { return std::fabs(factor - 1) < 1e-4; };
  const auto is_changed = [&](double factor) { return shows(factor - 1, c.magnitude); };
  if (c.axis.has_value() && says_word(cause, "axis", name_of(*c.axis))) {
    for (int i = 0; i < std::ssize(*factors); ++i) {
      const double factor = (*factors)[static_cast<std::size_t>(i)];
      if (i == c.coordinate ? !is_changed(factor) : !is_right(factor)) return false;
    }
    return true;
  }
  return std::ranges::any_of(*factors, is_changed) &&
         std::ranges::all_of(*factors, [&](double f) { return is_changed(f) || is_right(f); });
}

bool holds(Says says, const Cause& cause, const Composition& c, std::span<const int> wrong_ranks) {
  const auto number = [&](std::string_view name) {
    return cause.number(name).value_or(std::nan(""));
  };
  const auto most = static_cast<double>(wrong_ranks.size());
  switch (says) {
    case Says::kNothing:
      return true;
    case Says::kFactor:
      return shows(number("scale") - 1, c.magnitude);
    case Says::kRootOfFactor:
      return shows(std::pow(number("scale"), 2) - 1, c.magnitude);
    case Says::kFactors:
      return says_factors(cause, c);
    case Says::kScaleZero:
      return number("scale") == 0;
    case Says::kLargerBy:
      return number("offset") > 0;
    case Says::kShiftInUnits:
      return shows(number("shift"), c.magnitude);
    case Says::kOneZero:
      return number("zeros") <= most;
    case Says::kOneKept:
      return number("kept") <= most;
    case Says::kOneElement:
      return number("first") == number("last");
    case Says::kByOne:
      return std::fabs(number("shift")) == 1;
    case Says::kToBf16:
      return says_word(cause, "dtype", "bf16");
    case Says::kOverTheCall:
      return says_word(cause, "axis", name_of(c.called.axis));
  }
  return false;
}

bool is_about(const RightCause& right, const Composition& c) {
  return (right.points & bit(c.point)) != 0 && right.change == c.change &&
         (right.extents & bit(c.extent)) != 0 &&
         (!right.purpose.has_value() || *right.purpose == c.called.purpose);
}

/// Whether a cause that tells the place tells that of the bug.
bool tells_its_place(const Cause& cause, const Composition& c) {
  const bool is_call = c.point == StudyPoint::kCollective;
  const auto is_for = [&](Purpose first, Purpose second) {
    return is_call && (c.called.purpose == first || c.called.purpose == second);
  };
  const auto is_its_axis = [&](std::string_view name) {
    return (c.axis.has_value() && says_word(cause, name, name_of(*c.axis))) ||
           (is_call && says_word(cause, name, name_of(c.called.axis)));
  };
  switch (cause.id) {
    case CauseId::kCopiesDiffer:
      return is_its_axis("axes");
    case CauseId::kPartNotReached:
      // what a rank has of a call's result or a parameter may be a part of the tensor
      return is_its_axis("axis") && (c.extent != StudyExtent::kAll || (kTaps & bit(c.point)) == 0);
    case CauseId::kReceivedOther:
      return is_for(Purpose::kPipeForward, Purpose::kPipeBackward);
    case CauseId::kWrongBetweenStages:
      return is_for(Purpose::kPipeBackward, Purpose::kPipeBackward);
    case CauseId::kWrongWithForeignKeys:
      return is_for(Purpose::kRingKv, Purpose::kRingDkv);
    case CauseId::kSameRowAdded:
      return c.change == StudyChange::kShift && c.extent == StudyExtent::kAll;
    default:
      return true;
  }
}

}  // namespace

std::string_view name_of(CauseGrade grade) noexcept {
  constexpr std::array kNames = {"", "right", "place only", "wrong", "none"};
  static_assert(std::size(kNames) == kNumGrades);
  return kNames.at(static_cast<std::size_t>(grade));
}

CauseGrade grade_of(const Composition& composition, std::span<const int> wrong_ranks,
                    const Blame& blame) {
  const Cause& cause = blame.cause;
  if (cause.empty()) return CauseGrade::kNone;
  const bool is_there = std::ranges::all_of(blame.ranks, [&](int rank) {
    return std::ranges::find(wrong_ranks, rank) != wrong_ranks.end();
  });
  if (!is_there || !blame.at_place.value_or(true)) return CauseGrade::kWrong;
  const bool is_right = std::ranges::any_of(kRightCauses, [&](const RightCause& right) {
    return right.cause == cause.id && is_about(right, composition) &&
           holds(right.says, cause, composition, wrong_ranks);
  });
  if (is_right) return CauseGrade::kRight;
  const bool is_place = std::ranges::find(kTellThePlace, cause.id) != kTellThePlace.end();
  return is_place && tells_its_place(cause, composition) ? CauseGrade::kPlaceOnly
                                                         : CauseGrade::kWrong;
}

}  // namespace isoshard
