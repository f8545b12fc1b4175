// SPDX-License-Identifier: Apache-2.0
/// The likely cause of a divergence as data: an id, named values, and the sentence made of them.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "harness/ids/said.h"

namespace isoshard {

/// Ids are stable: reports, tests and the fault catalog use their names. Texts and claims are in
/// cause.cc, meanings in cause_notes.cc.
enum class CauseId : std::uint16_t {
  kNone,
  // one factor, one offset, one rank's share
  kScale,
  kScaleNearOne,
  kScaleOfFormula,
  kClippingNotApplied,
  kClippedTwice,
  kScaledUpToLimit,
  kClippedByOtherNorm,
  kRankLocalPartial,
  kRankLocal,
  kMeanOfShards,
  kConstantOffset,
  kSameRowAdded,
  kPartScaled,
  kPartOffset,
  kPartMoved,
  kPartRounded,
  kOneElementWrong,
  kPartWrong,
  kZeros,
  kNumberOff,
  kNumbersOff,
  kCopiesDifferOverAxes,
  kEitherCopyWrong,
  kValuesNotFinite,
  // accumulation
  kLargestPart,
  kSmallestPart,
  kSumRoundedBetween,
  // attention
  kCausalMaskShowsNextToken,
  kCausalMaskHidesOwnToken,
  kCausalMaskShowsAllTokens,
  kCpChunksInWrongOrder,
  kOwnQueriesOnly,
  kKvHeadsInTurn,
  kScoresScaledByRoot,
  kScoresScaledByRatio,
  // data
  kIdsOfEarlierStep,
  kIdsTooLarge,
  kIdsTooSmall,
  kIdsMiscounted,
  kFlagOutOfRange,
  kFlagWrongOnEveryRank,
  kFlagNotReduced,
  kLossScaleAfterOverflow,
  kLossScaleChangedTwice,
  kLossScaleWithoutOverflow,
  // factor
  kFactorPerRank,
  kFactorPerRankOfFormula,
  kScaledByRankPlusOne,
  kDividesByOwnCount,
  kWeightedByOwnCount,
  kSummandFactors,
  // micro-batches
  kMicroBatchMissing,
  kMicroBatchRankLocal,
  kPiecesRankLocal,
  kMicroBatchWeights,
  kTiedUseMissing,
  // moved
  kSlicesRepeated,
  kSlicesShifted,
  kSlicesPermuted,
  kTokensElsewhere,
  kValuesOfOtherRanks,
  kTokensPermutedBetweenSamples,
  kSameValuesElsewhere,
  // norm
  kSquaresLeftOut,
  kSquaresCountedTwice,
  kSquaresOfCopiesCounted,
  // part
  kPartNotReached,
  // read
  kStaleParametersRead,
  kParametersOfAnother,
  kPredecessorPadding,
  kOneMaskForSamples,
  kOneMaskForTokens,
  kOneMaskForPlaces,
  kGradientOfOtherActivation,
  kValuesOfOtherTensor,
  kWrongValuesOfOtherTensor,
  // resume
  kOptimizerStatesSwapped,
  kOptimizerStateOfOther,
  kOptimizerStateOfOtherKind,
  kMasksOfOtherRank,
  kSamplerAhead,
  kSamplerBehind,
  kUpdatesMiscounted,
  kMasksOfOtherStep,
  kOtherMaskSeed,
  // rounding
  kRounded,
  kSummandsRounded,
  kMultipliedWithReciprocal,
  kNotMultipliedWithReciprocal,
  kMicroBatchSumsRounded,
  kMastersCutOff,
  // rule
  kMomentWithOtherFactors,
  kMomentWithOtherBeta,
  kEpsInsideRoot,
  kEpsInsideUncorrectedRoot,
  kRootMissing,
  kFirstMomentUncorrected,
  kSecondMomentUncorrected,
  kMomentsUncorrected,
  kCorrectionOfOtherUpdate,
  kOtherEps,
  kDecayBehindStep,
  kStepNotSkipped,
  kStateOfSkippedStep,
  kUntrainedChanged,
  kUntrainedDecayed,
  kUntrainedScaled,
  // scalar
  kValidTokensElsewhere,
  kFewerValidTokens,
  kMoreValidTokens,
  kIdsInOtherOrder,
  kIdsRepeated,
  kMeanOfRankMeans,
  kReplicatedCountedOften,
  kNormOfOneRank,
  kReplicatedLeftOut,
  kLargestElement,
  kNormSquared,
  kNormsAdded,
  kNormsOfAxisAdded,
  kSquaresNotSummed,
  kPaddingInSoftmax,
  kOffsetOfDegree,
  kOffsetOfWidths,
  kDividedByOtherCount,
  kRateOfOtherStep,
  kHyperparametersDiffer,
  // softmax
  kOwnLargestLogit,
  kTargetsInFirstColumnLost,
  kTargetsInLastColumnLost,
  kExponentialsOfRankRounded,
  kExponentialsRounded,
  kLogarithmRounded,
  kSmoothingOverPadding,
  // stage
  kBackwardReadsEarlierWeight,
  kBackwardReadsOtherWeight,
  kBackwardReadsZerosInPart,
  kBackwardReadsMovedParts,
  kBackwardReadsZeros,
  kNothingDropped,
  kModuleFrozen,
  kOutputDetached,
  kInputBufferReused,
  kWrongBetweenStages,
  kReceivedOther,
  // stale
  kStaleBySteps,
  kMicroBatchOfStepBefore,
  kValuesOfMicroBatch,
  kMasksOfMicroBatch,
  kMasksOfMicroBatches,
  kMasksOfSamples,
  kNotCleared,
  // step
  kNotUpdated,
  kAsBeforeStep,
  kRowsNotUpdated,
  kStepOfOwnMatrix,
  kColumnsNotUpdated,
  kRunNotUpdated,
  kElementsNotUpdated,
  kDecayWithRateOfSettings,
  kDecayWithRateOfStep,
  kDecayWithoutRate,
  kDecayLeftOut,
  kDecayAppliedTwice,
  kDecayAppliedTimes,
  // tensor
  kPartsOutOfOrder,
  kShardsOfOtherRank,
  kCutAsOneBlock,
  kCutAsOneWithOther,
  kNotSlices,
  kUpdateWithRateOfStep,
  kSamplesMissing,
  kInputSideOnly,
  kMixedDtypes,
  kStateInOtherDtype,
  kMastersInOtherDtype,
  kParameterValuesAdded,
  kParameterAddedTimes,
  kParameterNotAdded,
  // token
  kPositionsRestart,
  kWrongWithForeignKeys,
  kPositionsOff,
  kOtherFrequencies,
  kFrequenciesRounded,
  kOtherBase,
  kLastTargetsMissing,
  kMeanOfCpRankMeans,
  // vocabulary
  kForeignIdsNotMasked,
  kRowsWithoutGradient,
  kRowsOfAbsentIds,
  kRepeatedIdsAveraged,
  kRepeatedIdsNotSummed,
  kRowAddedToForeignIds,
  kRowsOfOtherIds,
  kForeignTargetsNotMasked,
  kLogitRowsNotZero,
  kTargetNotSubtracted,
  kSoftmaxOfOwnColumns,
  kUncountedTokens,
  // what a run repeats
  kRecomputedMaskDiffers,
  kRecomputedActivationsDiffer,
  kRightAtEndOfStep,
  kNotRepeatable,
  // calls
  kNoCallAlongAxis,
  kCallMadeAgain,
  // tensors of checkpoints
  kTensorsExchanged,
  kEqualsOtherTensor,
  kTransposed,
  kHalvesExchanged,
  kPartsInOtherOrder,
  // given by the Python package, or another program
  kGivenCause,
  kNoDataSampler,
  kOtherMicroBatches,
  kOwnSamplesOnEachRank,
  kBatchStatistics,
  kMeanOfOwnLabels,
  kSamplesLeftOut,
  kFunctionWrong,
  kLossScaledOnRanks,
  kLossDividedByOtherLabels,
  kLossWeightsOfMicroBatches,
  kLossWeightsOfClasses,
  kLossOfOtherTokens,
  kLossOfOtherLabels,
  kLossSmoothing,
  kLossPenalizesLogits,
  kLossRounded,
  kLossTermBesideOutput,
  kLossWrongOnRanks,
  // samples and steps of a training loop
  kSamplesForeign,
  kStepWithoutForward,
  kStepSkipped,
  // what ranks do, counted by the Python package
  kSamplesCut,
  kSamplesRepeatedToFill,
  kStepsOfRanksDiffer,
  kGradientsCleared,
  kReplicasTrainApart,
  kEnd  ///< behind the last id
};

/// What a cause claims, from the claim that fits wrong values by chance least to the one that
/// always fits. Of several causes of one tensor the first claim is the likely one.
enum class Claim : std::uint8_t {
  kFact,           ///< other records show it: counts, flags, dtypes, sample ids
  kCounted,        ///< the ids of the tensor differ from the reference's in their counts
  kSameBytes,      ///< the bytes of the one value that an operation should have replaced or moved
  kOtherSource,    ///< the values of another record, or right values rounded in a known place
  kRule,           ///< numbers of the run, or an operation with one known change, give the values
  kFittedNumber,   ///< one number, or one extent, was fitted
  kFittedNumbers,  ///< several numbers were fitted
  kFittedPart,     ///< a number and an extent were fitted
  kRearranged,     ///< right values stand at other places, in a stated order, or are missing there
  kScattered,      ///< the right values stand at other places, in no order
  kPlace,          ///< only where the tensor is wrong
  kDifference,     ///< only that copies differ
};

[[nodiscard]] Claim claim_of(CauseId id) noexcept;

[[nodiscard]] std::span<const IdRow<CauseId>> rows_of(CauseId id) noexcept;
[[nodiscard]] constexpr std::string_view kind_of(CauseId) noexcept {
  return "cause";
}

/// What a pattern found. Without an id it found nothing.
using Cause = Said<CauseId>;
/// The id and the values that a cause must have.
using ExpectedCause = ExpectedId<CauseId>;

[[nodiscard]] inline Cause make_cause(CauseId id, NamedValues values = {}) {
  return said(id, std::move(values));
}

}  // namespace isoshard
