// SPDX-License-Identifier: Apache-2.0
/// A finding as data: an id, named values, and the sentences made of them.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#include "harness/ids/said.h"

namespace isoshard {

/// Ids are stable: reports and tests use their names. Texts are in finding.cc.
enum class FindingId : std::uint8_t {
  kNone,
  // numbers of one tensor
  kDiffers,
  kCopiesDifferFromReference,
  kCopiesDiffer,
  kSummandCopiesDiffer,
  kUntouchedElementMoved,
  kRowWithoutStep,
  kMaskedElementMovedTooFar,
  kOutsidePublishedBound,
  kStepNotOfRule,
  kNotFinite,
  kCopiesOfSkippedStepDiffer,
  // form of one tensor
  kOtherShape,
  kLayoutsDiffer,
  kCoarserDtype,
  kOtherGradientScale,
  kUnexpectedPartialSum,
  kDtypesOfRanksDiffer,
  kStoredInOtherDtype,
  kPartsDoNotTile,
  // records that are missing or too many
  kMissing,
  kMissingOnRanks,
  kMissingBesideLikes,
  kExtra,
  kNotInCheckpoint,
  kReadsMissing,
  kReadsMissingOnRanks,
  // what a run repeats
  kReadsOtherParameter,
  kRecomputedOtherwise,
  kRunsDiffer,
  kOtherBits,
  kOtherRanks,
  // many tensors together
  kPoolScale,
  kPoolShift,
  // collectives
  kCallsMissing,
  kCallDiffersFromTable,
  kUnknownCallDiffersFromTable,
  kNoJournal,
  kCallsOfRanksDiffer,
  kReducedOtherTimes,
  kCallsOfStepsDiffer,
  // samples, found by the Python package
  kGiven,
  kSamplesNotShared,
  kEqualInputs,
  kOtherNumberOfCalls,
  kSamplesTwice,
  kSamplesMissing,
  kBufferDiffers,
  kEnd  ///< behind the last id
};

[[nodiscard]] std::span<const IdRow<FindingId>> rows_of(FindingId id) noexcept;
[[nodiscard]] constexpr std::string_view kind_of(FindingId) noexcept {
  return "finding";
}

/// The id and the values that a finding must have.
using ExpectedFinding = ExpectedId<FindingId>;

}  // namespace isoshard
