// SPDX-License-Identifier: Apache-2.0
/// Parts of sentences that several causes or findings share, or that some of them end with.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "harness/ids/said.h"

namespace isoshard {

/// Texts are in phrase.cc. Names are for texts_golden.txt alone.
enum class PhraseId : std::uint8_t {
  kNone,
  // of findings
  kOverAxes,
  kMustBeEqual,
  kAllowedNorm,
  kAllowedError,
  kNotFiniteOnOneSide,
  kFirstStoredElement,
  kFirstElement,
  kActualElement,
  kBeforeStep,
  kOneTensor,
  kTensorsTogether,
  kRoundingIsOffered,
  kNotEmulated,
  kNeverReduced,
  kMoreNeverReduced,
  kFirstCallOf,
  kCallMustBe,
  kCallIsMissing,
  kCallIsTooMany,
  // of several causes
  kCoordinates,
  kOn,
  kOnRanks,
  // of causes: one factor, one offset, one rank's share
  kRanksThatShareAPart,
  kOnTheRanks,
  kUpdate,
  kRootOfScores,
  kShareThatDropoutKeeps,
  kShareThatDropoutKeepsTwice,
  // of causes: accumulation
  kFromZeroTo,
  // of causes: data
  kInStepZero,
  kInSteps,
  kIdsSeenMoreOften,
  kIdsMissed,
  kIdsForeign,
  kAndIds,
  kStays,
  kGrowsBy,
  kShrinksBy,
  kSinceOverflow,
  // of causes: factor
  kAlong,
  kTimesSummand,
  // of causes: moved
  kCopiesDifferOver,
  kPosition,
  kPositions,
  kTwice,
  kTimes,
  kMoves,
  kInBlocks,
  kPlaceHas,
  kTokenHas,
  // of causes: norm
  kPartsThatSeveralHold,
  kPartsOfVectors,
  kPartsOfRank,
  kAll,
  kAllNorms,
  kAllBiases,
  kAllParametersOf,
  kAllOutsideOfLayers,
  kParameterCount,
  // of causes: part
  kElementsOnRank,
  kElementRun,
  kSlicesOfDim,
  kAllElements,
  kRestIsRight,
  kOfWhatTheStepAdds,
  kIsFormula,
  kOrFactor,
  kOrFactors,
  kOrTimes,
  // of causes: read
  kRanks,
  // of causes: resume
  kParametersRight,
  kMaskOfRankEquals,
  kMasksOfRanksEqual,
  kMasksOfRowEqual,
  kRightBeforeSaving,
  kAfterResume,
  // of causes: rule
  kMomentOfBoth,
  kMomentOfGradient,
  // of causes: scalar
  kOnePerSample,
  kSomePerSample,
  kAtValidToken,
  kPlainTimes,
  kTimesOfFormula,
  kOfTokens,
  kRoundedDown,
  // of causes: stage
  kInMicroBatchesOnly,
  // of causes: stale
  kCameBefore,
  kOfStep,
  kTimesAdded,
  // of causes: step
  kPartOfDpRank,
  kElement,
  kElements,
  // of causes: tensor
  kFused,
  kShards,
  kWholeValues,
  kOthersAreRight,
  kModelCast,
  kAutocast,
  kTimesParameter,
  kOneLessThanAxis,
  // of causes: vocabulary
  kAndPresent,
  kTheLast,
  kAnyOne,
  // of causes: around the first cause
  kCauseOf,
  kFurther,
  kSameKinds,
  kOfAnotherTensor,
  kOfAllGradients,
  kOfAllClippedGradients,
  kOfAllParameters,
  kTheSameFor,
  kOfPoints,
  kForwardExact,
  kForwardRight,
  kGradientsWrong,
  kAlthoughReduced,
  kCalledAt,
  // of causes: samples and steps of a training loop
  kTheyAreOfStep,
  kEnd  ///< behind the last id
};

[[nodiscard]] std::span<const IdRow<PhraseId>> rows_of(PhraseId id) noexcept;
[[nodiscard]] constexpr std::string_view kind_of(PhraseId) noexcept {
  return "phrase";
}

[[nodiscard]] std::string phrase(PhraseId id, const NamedValues& values = {});

}  // namespace isoshard
