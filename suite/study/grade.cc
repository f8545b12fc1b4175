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
  kLogOfFactor,   ///< offset: its logarithm
  kFactors,       ///< factors: 1 + magnitude on the ranks that go wrong, 1 on others
  kScaleZero,     ///< scale: 0
  kLargerBy,      ///< offset: above 0, as is each shift. How large it is depends on the values.
  kOneZero,       ///< zeros: no more than one a rank
  kOneKept,       ///< kept: no more than one a rank
  kOneElement,    ///< first, last: the same
  kOneParameter,  ///< num_parameters: 1
  kOneTwice,      ///< num_parameters: 1, of a factor of 2
  kByOne,         ///< shift: one place, either way
  kToBf16,        ///< dtype
  kOverTheCall,   ///< axis: that of the collective
  kOneThatGives,  ///< axis, coordinate: those of the only ranks that give what they should
};

using Points = unsigned;
using Extents = unsigned;

constexpr Points bit(FaultPoint point) {
  return 1U << static_cast<unsigned>(point);
}
constexpr Extents bit(FaultExtent extent) {
  return 1U << static_cast<unsigned>(extent);
}
constexpr Points kTaps = bit(FaultPoint::kForward) | bit(FaultPoint::kBackward),
                 kCalls = bit(FaultPoint::kCollective), kValues = kTaps | kCalls,
                 kSteps = bit(FaultPoint::kUpdate), kAnyPoint = kValues | kSteps;
constexpr Extents kWhole = bit(FaultExtent::kAll), kRow = bit(FaultExtent::kPart),
                  kOne = bit(FaultExtent::kElement), kSome = kWhole | kRow, kAny = kSome | kOne;

struct RightCause {
  Points points;
  FaultChange change;
  Extents extents;
  CauseId cause;
  Says says = Says::kNothing;
  std::optional<Purpose> purpose = {};  ///< of the call; nothing: of any
};

constexpr RightCause kRightCauses[] = {
    {kAnyPoint, FaultChange::kScale, kAny, CauseId::kPartScaled, Says::kFactor},
    {kAnyPoint, FaultChange::kShift, kAny, CauseId::kPartOffset, Says::kLargerBy},
    {kAnyPoint, FaultChange::kRoll, kSome, CauseId::kPartMoved, Says::kByOne},
    {kAnyPoint, FaultChange::kRound, kSome, CauseId::kPartRounded, Says::kToBf16},
    // One number has a factor and an offset, of which one is the bug.
    {kAnyPoint, FaultChange::kScale, kOne, CauseId::kOneElementWrong, Says::kFactor},
    {kAnyPoint, FaultChange::kShift, kOne, CauseId::kOneElementWrong, Says::kLargerBy},
    {kAnyPoint, FaultChange::kZero, kOne, CauseId::kOneElementWrong, Says::kScaleZero},
    {kAnyPoint, FaultChange::kScale, kWhole, CauseId::kScale, Says::kFactor},
    {kAnyPoint, FaultChange::kScale, kWhole, CauseId::kScaleNearOne, Says::kFactor},
    // The factor is right; that a number of the run fits it is chance, and no claim of its own.
    {kAnyPoint, FaultChange::kScale, kWhole, CauseId::kScaleOfFormula, Says::kFactor},
    {kAnyPoint, FaultChange::kScale, kWhole, CauseId::kFactorPerRank, Says::kFactors},
    {kAnyPoint, FaultChange::kScale, kWhole, CauseId::kFactorPerRankOfFormula, Says::kFactors},
    // A call may carry several tensors, some of them wholly in the part.
    {kCalls, FaultChange::kScale, kRow, CauseId::kScale, Says::kFactor},
    {kCalls, FaultChange::kScale, kRow, CauseId::kScaleOfFormula, Says::kFactor},
    {kCalls, FaultChange::kShift, kRow, CauseId::kConstantOffset, Says::kLargerBy},
    // What a call gives may be recorded first in a sum with the residual stream.
    {kCalls, FaultChange::kScale, kWhole, CauseId::kSummandFactors, Says::kFactors},
    // The call has squares, the record their root.
    {kCalls, FaultChange::kScale, kWhole, CauseId::kScale, Says::kRootOfFactor, Purpose::kClipNorm},
    {kCalls, FaultChange::kScale, kWhole, CauseId::kScaleOfFormula, Says::kRootOfFactor,
     Purpose::kClipNorm},
    // A loss is one number, of which there is no part, and m of its size added scales it.
    {kCalls, FaultChange::kScale, kAny, CauseId::kScale, Says::kFactor, Purpose::kLossReduce},
    {kCalls, FaultChange::kScale, kAny, CauseId::kScaleOfFormula, Says::kFactor,
     Purpose::kLossReduce},
    // An offset and a factor of the loss are alternatives, one of which is the bug.
    {kCalls, FaultChange::kScale, kAny, CauseId::kNumberOff, Says::kFactor, Purpose::kLossReduce},
    {kCalls, FaultChange::kScale, kAny, CauseId::kNumbersOff, Says::kFactors, Purpose::kLossReduce},
    {kCalls, FaultChange::kShift, kAny, CauseId::kNumberOff, Says::kFactor, Purpose::kLossReduce},
    {kCalls, FaultChange::kZero, kAny, CauseId::kNumberOff, Says::kScaleZero, Purpose::kLossReduce},
    {kCalls, FaultChange::kScale, kWhole, CauseId::kNumberOff, Says::kRootOfFactor,
     Purpose::kClipNorm},
    // The call has the squares of each parameter.
    {kCalls, FaultChange::kZero, kOne, CauseId::kSquaresLeftOut, Says::kOneParameter,
     Purpose::kClipNorm},
    {kCalls, FaultChange::kScale, kOne, CauseId::kSquaresCountedTwice, Says::kOneTwice,
     Purpose::kClipNorm},
    // The call has a sum of exponentials, the loss its logarithm.
    {kCalls, FaultChange::kScale, kWhole, CauseId::kOffsetOfDegree, Says::kLogOfFactor,
     Purpose::kVocabParallelLogsumexp},
    {kCalls, FaultChange::kShift, kAny, CauseId::kScale, Says::kFactor, Purpose::kLossReduce},
    {kCalls, FaultChange::kShift, kAny, CauseId::kScaleOfFormula, Says::kFactor,
     Purpose::kLossReduce},

    {kAnyPoint, FaultChange::kShift, kWhole, CauseId::kConstantOffset, Says::kLargerBy},

    {kValues, FaultChange::kZero, kSome, CauseId::kZeros},
    {kValues, FaultChange::kZero, kOne, CauseId::kZeros, Says::kOneZero},
    {kValues, FaultChange::kZero, kWhole, CauseId::kScale, Says::kScaleZero},
    {kCalls, FaultChange::kZero, kWhole, CauseId::kNormOfOneRank, Says::kOneThatGives,
     Purpose::kClipNorm},
    // No record tells a gradient of zeros from one that was never made.
    {bit(FaultPoint::kBackward), FaultChange::kZero, kWhole, CauseId::kOutputDetached},
    // A step of zeros leaves the parameter as it was: all of it, or what the rank has of it.
    {kSteps, FaultChange::kZero, kWhole, CauseId::kNotUpdated},
    {kSteps, FaultChange::kZero, kWhole, CauseId::kAsBeforeStep},
    {kSteps, FaultChange::kZero, kAny, CauseId::kRowsNotUpdated},
    {kSteps, FaultChange::kZero, kSome, CauseId::kColumnsNotUpdated},
    {kSteps, FaultChange::kZero, kSome, CauseId::kRunNotUpdated},
    {kSteps, FaultChange::kZero, kOne, CauseId::kRunNotUpdated, Says::kOneElement},
    {kSteps, FaultChange::kZero, kSome, CauseId::kElementsNotUpdated},
    {kSteps, FaultChange::kZero, kOne, CauseId::kElementsNotUpdated, Says::kOneKept},

    {kValues, FaultChange::kRoll, kSome, CauseId::kSlicesShifted, Says::kByOne},
    {kValues, FaultChange::kRoll, kSome, CauseId::kSlicesPermuted},
    {kValues, FaultChange::kRoll, kSome, CauseId::kSameValuesElsewhere},

    {kValues, FaultChange::kRound, kWhole, CauseId::kRounded, Says::kToBf16},
    {kCalls, FaultChange::kRound, kWhole, CauseId::kExponentialsRounded, Says::kToBf16,
     Purpose::kVocabParallelLogsumexp},

    {kCalls, FaultChange::kSkip, kWhole, CauseId::kRankLocalPartial, Says::kOverTheCall},
    {kCalls, FaultChange::kSkip, kWhole, CauseId::kRankLocal, Says::kOverTheCall},
    {kCalls, FaultChange::kSkip, kWhole, CauseId::kPiecesRankLocal, Says::kOverTheCall},
    {kCalls, FaultChange::kSkip, kWhole, CauseId::kNoCallAlongAxis, Says::kOverTheCall},
    {kCalls, FaultChange::kSkip, kWhole, CauseId::kSquaresNotSummed, Says::kOverTheCall,
     Purpose::kClipNorm},
    {kCalls, FaultChange::kSkip, kWhole, CauseId::kNormOfOneRank, Says::kOverTheCall,
     Purpose::kClipNorm},
    {kCalls, FaultChange::kSkip, kWhole, CauseId::kOwnLargestLogit, Says::kNothing,
     Purpose::kVocabParallelMax},
    {kCalls, FaultChange::kSkip, kWhole, CauseId::kSoftmaxOfOwnColumns, Says::kNothing,
     Purpose::kVocabParallelLogsumexp},
};

/// They say where copies or values differ, or how values look, and not what was done to them.
constexpr std::array kTellThePlace = {
    CauseId::kCopiesDifferOverAxes,
    CauseId::kPartNotReached,
    CauseId::kValuesNotFinite,
    CauseId::kNotSlices,
    CauseId::kLogitRowsNotZero,
    CauseId::kRightAtEndOfStep,
    CauseId::kReceivedOther,
    CauseId::kWrongBetweenStages,
    CauseId::kWrongWithForeignKeys,
    CauseId::kSameRowAdded,
    CauseId::kOneElementWrong,
    CauseId::kPartWrong,
    CauseId::kNumberOff,
    CauseId::kNumbersOff,
    CauseId::kEitherCopyWrong,
};

bool says_word(const Cause& cause, std::string_view name, std::string_view word) {
  return !word.empty() && word_of(cause.values, name) == word;
}

/// Whether the number shows the magnitude with an error of at most a tenth.
bool shows(double difference, double magnitude) {
  return std::fabs(difference - magnitude) <= 0.1 * std::fabs(magnitude);
}

bool says_factors(const Cause& cause, const Injection& c) {
  const IdValue* const value = find_value(cause.values, "factors");
  const auto* const factors = value == nullptr ? nullptr : std::get_if<std::vector<double>>(value);
  if (factors == nullptr) return false;
  const auto is_right = [](double factor) { return std::fabs(factor - 1) < 1e-4; };
  const auto is_changed = [&](double factor) { return shows(factor - 1, c.magnitude); };
  if (c.ranks.has_value() && says_word(cause, "axis", name_of(c.ranks->axis))) {
    for (int i = 0; i < std::ssize(*factors); ++i) {
      const double factor = (*factors)[static_cast<std::size_t>(i)];
      if ((i == c.ranks->coordinate) != c.ranks->are_others ? !is_changed(factor)
                                                            : !is_right(factor))
        return false;
    }
    return true;
  }
  return std::ranges::any_of(*factors, is_changed) &&
         std::ranges::all_of(*factors, [&](double f) { return is_changed(f) || is_right(f); });
}

bool holds(Says says, const Cause& cause, const Injection& c, std::span<const int> wrong_ranks) {
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
    case Says::kLogOfFactor:
      return shows(std::exp(number("offset")) - 1, c.magnitude);
    case Says::kFactors:
      return says_factors(cause, c);
    case Says::kScaleZero:
      return number("scale") == 0;
    case Says::kLargerBy:
      return number("offset") > 0;
    case Says::kOneZero:
      return number("zeros") <= most;
    case Says::kOneKept:
      return number("kept") <= most;
    case Says::kOneElement:
      return number("first") == number("last");
    case Says::kOneParameter:
      return number("num_parameters") == 1;
    case Says::kOneTwice:
      return number("num_parameters") == 1 && c.magnitude == 1;
    case Says::kByOne:
      return std::fabs(number("shift")) == 1;
    case Says::kToBf16:
      return says_word(cause, "dtype", "bf16");
    case Says::kOverTheCall:
      return says_word(cause, "axis", name_of(c.called.axis));
    case Says::kOneThatGives:
      return c.side == FaultSide::kGiven && c.ranks.has_value() && c.ranks->are_others &&
             says_word(cause, "axis", name_of(c.ranks->axis)) &&
             number("coordinate") == c.ranks->coordinate;
  }
  return false;
}

bool is_about(const RightCause& right, const Injection& c) {
  return (right.points & bit(c.point)) != 0 && right.change == c.change &&
         (right.extents & bit(c.extent)) != 0 &&
         (!right.purpose.has_value() || *right.purpose == c.called.purpose);
}

/// Whether a cause that tells the place tells that of the bug.
bool tells_its_place(const Cause& cause, const Injection& c) {
  const bool is_call = c.point == FaultPoint::kCollective;
  const auto is_for = [&](Purpose first, Purpose second) {
    return is_call && (c.called.purpose == first || c.called.purpose == second);
  };
  const auto is_its_axis = [&](std::string_view name) {
    return (c.ranks.has_value() && says_word(cause, name, name_of(c.ranks->axis))) ||
           (is_call && says_word(cause, name, name_of(c.called.axis)));
  };
  switch (cause.id) {
    case CauseId::kCopiesDifferOverAxes:
    case CauseId::kEitherCopyWrong:
      return is_its_axis("axes");
    case CauseId::kPartNotReached:
      // what a rank has of a call's result or a parameter may be a part of the tensor
      return is_its_axis("axis") && (c.extent != FaultExtent::kAll || (kTaps & bit(c.point)) == 0);
    case CauseId::kWrongBetweenStages:
      return is_for(Purpose::kPipeBackward, Purpose::kPipeBackward);
    case CauseId::kWrongWithForeignKeys:
      return is_for(Purpose::kRingKv, Purpose::kRingDkv);
    case CauseId::kOneElementWrong:
    case CauseId::kPartWrong:
      return is_call || c.extent != FaultExtent::kAll;
    case CauseId::kSameRowAdded:
      return c.change == FaultChange::kShift && c.extent == FaultExtent::kAll;
    default:
      return true;
  }
}

/// Whether a number is reduced over another axis after the call, so that what is wrong on some
/// ranks is so on all.
bool reaches_all_ranks(const Injection& c) {
  return c.point == FaultPoint::kCollective &&
         (c.called.purpose == Purpose::kClipNorm || c.called.purpose == Purpose::kLossReduce);
}

}  // namespace

std::string_view name_of(CauseGrade grade) noexcept {
  constexpr std::array kNames = {"", "right", "place only", "wrong", "none"};
  static_assert(std::size(kNames) == kNumGrades);
  return kNames.at(static_cast<std::size_t>(grade));
}

bool tells_only_the_place(CauseId cause) {
  return std::ranges::find(kTellThePlace, cause) != kTellThePlace.end();
}

CauseGrade grade_of(const Injection& composition, std::span<const int> wrong_ranks,
                    const Blame& blame) {
  const Cause& cause = blame.cause;
  if (cause.empty()) return CauseGrade::kNone;
  // which copy is wrong is not known
  const bool is_any_rank = cause.id == CauseId::kEitherCopyWrong;
  const bool is_there = is_any_rank || reaches_all_ranks(composition) ||
                        std::ranges::all_of(blame.ranks, [&](int rank) {
                          return std::ranges::find(wrong_ranks, rank) != wrong_ranks.end();
                        });
  if (!is_there || !blame.at_place.value_or(true)) return CauseGrade::kWrong;
  const bool is_right = std::ranges::any_of(kRightCauses, [&](const RightCause& right) {
    return right.cause == cause.id && is_about(right, composition) &&
           holds(right.says, cause, composition, wrong_ranks);
  });
  if (is_right) return CauseGrade::kRight;
  return tells_only_the_place(cause.id) && tells_its_place(cause, composition)
             ? CauseGrade::kPlaceOnly
             : CauseGrade::kWrong;
}

}  // namespace isoshard
