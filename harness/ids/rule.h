// SPDX-License-Identifier: Apache-2.0
/// The rule that makes a verdict vacuous or incomplete, or rejects an input: an id, named values,
/// and the sentence made of them.
#pragma once
#include <cstdint>
#include <exception>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "harness/ids/said.h"

namespace isoshard {

/// Ids are stable: reports and tests use their names. Texts are in rule.cc.
enum class RuleId : std::uint8_t {
  kNone,
  // verdicts that prove nothing
  kRanksMissing,
  kReferenceEmpty,
  kNothingCompared,
  kReferenceNotFinite,
  kResponseMissing,
  kBiasMissing,
  kBiasDoesNotFit,
  kNotJudgeable,
  kAllZero,
  kGradientsZero,
  kOverflowParts,
  kNothingMoved,
  kAxisWithoutWitness,
  kInconclusive,
  kTooFewStepsJudged,
  kTooManyInsensitive,
  // settings and meshes
  kSettingsMissing,
  kSettingsDiffer,
  kOtherMesh,
  kMeshContradictsSettings,
  kMasksMissing,
  kGradientScalesDiffer,
  kStepRuleMissing,
  // trusted runs
  kTrustedLayoutInferred,
  kTrustedStatistics,
  kTrustedCopiesDiffer,
  kTrustedPartsDoNotTile,
  // layouts
  kTensorNotKept,
  kPaddingNotZero,
  kRankHoldsNothing,
  kTiedCopyMissing,
  kCutBesideCopies,
  kCutButNeverGathered,
  kLayoutNotInferable,
  kInferredNotKept,
  // responses
  kResponseOfNoRecord,
  kResponseDoesNotFit,
  kResponseTooLarge,
  kRedrawnDoesNotFit,
  kPerturbedSettingsDiffer,
  kPerturbedDataDiffer,
  kPerturbedTooFar,
  kPerturbedRecordMissing,
  kNotPerturbed,
  kPerturbedOnSeveralRanks,
  kPerturbedTensorBesideStatistics,
  // statistics that ranks made while they ran
  kStatisticsNotCredible,
  kComparedWithNothing,
  kComparedWithOther,
  kComparedWithOtherResponses,
  // bundles
  kFileForm,
  kUnknownSchema,
  kRunIncomplete,
  kFileChanged,
  kFileMissing,
  kFileNotListed,
  kFileTooMany,
  kWriterKilled,
  kOtherRun,
  kTensorsAsDescribed,
  kRecordedTwice,
  kCallsNotCounted,
  kPartsDoNotTile,
  kLocalDoesNotFitLayout,
  // folders of runs
  kReferenceOfSeveralRanks,
  kTwoReferences,
  kEmulationWithoutRun,
  kNoReferenceWithSettings,
  kReferenceWithoutRun,
  // checkpoints
  kNoSharedDtype,
  kNoFile,
  kCheckpointToConvert,
  kBundleForCheckpoint,
  // curves
  kNoCurves,
  kCurveTwice,
  kPerturbedCurveSteps,
  kCurvesBeginElsewhere,
  kCurveSettingsDiffer,
  kEnd  ///< behind the last id
};

[[nodiscard]] std::span<const IdRow<RuleId>> rows_of(RuleId id) noexcept;
[[nodiscard]] constexpr std::string_view kind_of(RuleId) noexcept {
  return "rule";
}

/// A rule that is broken, and how.
using Rule = Said<RuleId>;
using ExpectedRule = ExpectedId<RuleId>;

/// The rule carried by an error that rejects an input.
class BrokenRule {
 public:
  explicit BrokenRule(Rule rule) : rule_(std::move(rule)) {}
  virtual ~BrokenRule() = default;
  [[nodiscard]] const Rule& rule() const noexcept { return rule_; }

 private:
  Rule rule_;
};

/// An error of a class of core/base/error.h by a rule. Its message is the rule's text, after the
/// file that breaks it.
template <class Base>
class Refused : public Base, public BrokenRule {
 public:
  explicit Refused(const Rule& rule) : Base(rule.text), BrokenRule(rule) {}
  Refused(const std::filesystem::path& file, const Rule& rule)
      : Base(file.string() + ": " + rule.text), BrokenRule(rule) {}
};

/// The rule by which an error refuses; null for errors of other kinds.
[[nodiscard]] const Rule* rule_of(const std::exception& error) noexcept;

/// The message, and the name of the rule if there is one: "FILE: must hold ... [rule]".
[[nodiscard]] std::string message_of(const std::exception& error);

/// " [rule]", for the end of a line; empty without a rule.
[[nodiscard]] std::string in_brackets(const Rule& rule);

/// Throws a FileError "FILE: TEXT".
[[noreturn]] void refuse(const std::filesystem::path& file, RuleId id, NamedValues values = {});

}  // namespace isoshard
