// SPDX-License-Identifier: Apache-2.0
#include "harness/ids/example_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

namespace isoshard {
namespace {

using Ints = std::vector<std::int64_t>;
using Reals = std::vector<double>;

struct CauseExamples {
  CauseId id;
  NamedValues values;
};

/// By the name of the placeholder. Empty words are parts that are not always there.
const NamedValues& common_examples() {
  static const NamedValues kCommon = {
      {"axes", "tp"},
      {"axis", "tp"},
      {"bits", 8},
      {"by", 1},
      {"change", "stays"},
      {"columns", 3},
      {"coordinate", 1},
      {"copies", 2},
      {"decay", 0.1},
      {"declared", "fp32"},
      {"degree", 2},
      {"differing", 40},
      {"dim", 1},
      {"direction", "too large"},
      {"dp_rank", 1},
      {"dp_ranks", 1},
      {"dtype", "bf16"},
      {"elements", 1024},
      {"eps", 1e-8},
      {"expected", 0},
      {"expected_change", "shrinks by 0.5"},
      {"factors", Reals{2, 1}},
      {"first_rows", "3, 5"},
      {"first_samples", "0, 1"},
      {"fused", ""},
      {"group", "all norms"},
      {"guess", ""},
      {"head", "lm_head"},
      {"holders", "tp"},
      {"items", "ids"},
      {"largest", 0.002},
      {"last_right", "forward at layers.0.mlp (step 0)"},
      {"micro_batch", 1},
      {"module", "mlp.gate_proj"},
      {"num_ids", 24},
      {"num_rows", 2},
      {"num_tokens", 24},
      {"off", 24},
      {"offset", 0.25},
      {"on_ranks", ""},
      {"other", "layers.1.mlp.up_proj"},
      {"other_pp_rank", 0},
      {"others", ""},
      {"overflow_step", 1},
      {"padded", 100},
      {"parameter", "layers.1.mlp.up_proj.weight"},
      {"percent", 0.3},
      {"pp_rank", 1},
      {"rank", 1},
      {"ranks", 1},
      {"rate", 0.001},
      {"record", "input_ids"},
      {"reduction", "sum"},
      {"row", 0},
      {"samples", 4},
      {"scale", 2},
      {"shift", 1},
      {"sign", "+"},
      {"state", "exp_avg"},
      {"step", 1},
      {"steps", 1},
      {"tensor", "layers.1.self_attn.k_proj"},
      {"times", ""},
      {"token_counts", Reals{20, 40}},
      {"value", 2},
      {"values", 4096},
      {"where", "tp rank 1"},
      {"width", 97},
      {"word", "bias"},
      {"worst", 0.4},
  };
  return kCommon;
}

/// Of causes whose values are other ones, or belong together.
const std::vector<CauseExamples>& own_examples() {
  using enum CauseId;
  static const std::vector<CauseExamples> kOwn = {
      {kScale, {{"scale", 1.37}}},
      {kScaleNearOne, {{"away", 0.00012}}},
      {kScaleOfFormula, {{"formula", "tp"}}},
      {kClippedTwice, {{"scale", 0.5}}},
      {kClippedByOtherNorm, {{"scale", 0.93}}},
      {kMeanOfShards, {{"shards", 2}, {"best_fit", 0.5}}},
      {kPartScaled, {{"where", "elements 64..127"}}},
      {kPartOffset, {{"where", "elements 64..127"}}},
      {kPartMoved, {{"where", "elements 64..127"}}},
      {kPartRounded, {{"where", "elements 64..127"}}},
      {kPartWrong, {{"where", "elements 64..127"}}},
      {kOneElementWrong, {{"index", Ints{3, 5}}}},
      {kZeros, {{"zeros", 8}, {"rows", Ints{3, 5}}}},
      {kNumbersOff, {{"ranks", Ints{0, 1}}, {"offsets", Reals{0.25, -0.5}}}},
      {kValuesNotFinite, {{"num_values", 2}}},
      {kSumRoundedBetween, {{"sums", 1}, {"after", "0"}}},
      {kCpChunksInWrongOrder,
       {{"tensors", "keys and values"}, {"chunks", 4}, {"order", Ints{0, 3, 1, 2}}}},
      {kKvHeadsInTurn, {{"kv_heads", 2}, {"heads_of_kv_head", 2}}},
      {kScoresScaledByRoot, {{"scale", 0.125}, {"inverse", "1/"}, {"number", "head size"}}},
      {kScoresScaledByRatio, {{"scale", 0.5}}},
      {kIdsMiscounted, {{"until", "in steps 0..1"}, {"counts", "never seen: 5, 6"}}},
      {kFlagWrongOnEveryRank, {{"value", 1}}},
      {kLossScaleChangedTwice, {{"change", "shrinks by 0.25"}}},
      {kLossScaleWithoutOverflow, {{"good_steps", 2}, {"expected_change", "grows by 2"}}},
      {kFactorPerRank, {{"factors", Reals{1.37, 0.8}}}},
      {kFactorPerRankOfFormula, {{"along", " tp"}, {"behind", "2 = tp"}}},
      {kScaledByRankPlusOne, {{"factors", Reals{1, 2}}}},
      {kDividesByOwnCount, {{"axis", "dp"}, {"factors", Reals{1.5, 0.75}}}},
      {kWeightedByOwnCount, {{"axis", "dp"}, {"factors", Reals{0.6667, 1.333}}}},
      {kSummandFactors, {{"products", "2 x layers.1.mlp + 1 x layers.0"}}},
      {kMicroBatchMissing, {{"present", Ints{0}}, {"last", 1}}},
      {kMicroBatchRankLocal, {{"axis", "dp"}, {"local", Ints{0}}, {"right", 1}, {"last", 1}}},
      {kPiecesRankLocal, {{"axis", "dp"}}},
      {kMicroBatchWeights, {{"weights", Reals{0.667, 0.333}}, {"micro_batches", 2}}},
      {kTiedUseMissing, {{"present", "embed_tokens"}, {"missing", "lm_head"}}},
      {kSlicesRepeated, {{"positions", "positions 0..3"}, {"often", "twice"}}},
      {kTokensElsewhere, {{"tokens", "sample 0 token 1 has sample 1 token 1"}}},
      {kValuesOfOtherRanks, {{"owners", Ints{0}}}},
      {kPartNotReached, {{"elements", "elements 64..127 on tp rank 1"}}},
      {kParametersOfAnother, {{"read", "layers.0.mlp.up_proj.weight"}}},
      {kPredecessorPadding, {{"elements", 32}, {"predecessor", "layers.1.norm.weight"}}},
      {kOneMaskForSamples, {{"where", "dp ranks 0, 1"}}},
      {kOneMaskForTokens, {{"where", "cp ranks 0, 1"}}},
      {kOneMaskForPlaces, {{"where", "tp ranks 0, 1"}}},
      {kWrongValuesOfOtherTensor, {{"other", "layers.1.mlp.up_proj.weight"}, {"element", 0}}},
      {kOptimizerStatesSwapped, {{"state", "moments"}, {"other", "mlp.up_proj"}}},
      {kOptimizerStateOfOther, {{"state", "moments"}, {"other", "mlp.up_proj"}}},
      {kOptimizerStateOfOtherKind, {{"other", "exp_avg_sq"}}},
      {kMasksOfOtherRank, {{"masks", "mask of rank 1 equals"}, {"owner_rank", 0}}},
      {kUpdatesMiscounted, {{"counted", 3}, {"made", 4}}},
      {kMasksOfOtherStep, {{"step", 0}, {"expected", 2}}},
      {kSummandsRounded, {{"added_over", "dp"}, {"percent", 98}}},
      {kMultipliedWithReciprocal, {{"axis", "dp"}, {"degree", 3}}},
      {kNotMultipliedWithReciprocal, {{"axis", "dp"}, {"degree", 3}}},
      {kMastersCutOff, {{"cut", 2040}}},
      {kMomentWithOtherFactors,
       {{"seen", "0.9 x before + 0.2 x gradient"}, {"right", "0.9 x before + 0.1 x gradient"}}},
      {kMomentWithOtherBeta,
       {{"seen", "0.95 x before + 0.05 x gradient"},
        {"right", "0.9 x before + 0.1 x gradient"},
        {"used_beta", 2},
        {"own_beta", 1}}},
      {kCorrectionOfOtherUpdate, {{"used", 1}, {"update", 2}}},
      {kOtherEps, {{"used", 1e-6}}},
      {kUntrainedScaled, {{"factor", 0.999}}},
      {kFewerValidTokens, {{"num_tokens", 2}}},
      {kMoreValidTokens, {{"num_tokens", 2}}},
      {kIdsRepeated, {{"how_often", "2 = dp"}, {"share", "1/2"}}},
      {kMeanOfRankMeans, {{"means", 2}}},
      {kReplicatedLeftOut, {{"direction", "too small"}}},
      {kNormOfOneRank, {{"direction", "too small"}}},
      {kNormsAdded, {{"world_size", 4}}},
      {kOffsetOfDegree, {{"offset", 0.6931}}},
      {kOffsetOfWidths, {{"offset", 0.03046}}},
      {kDividedByOtherCount, {{"used", 60}, {"right", 62}}},
      {kHyperparametersDiffer, {{"name", "weight_decay"}, {"actual", 0.1}, {"expected", 0.01}}},
      {kSmoothingOverPadding, {{"smoothing", 0.1}}},
      {kBackwardReadsEarlierWeight, {{"step", 0}}},
      {kBackwardReadsOtherWeight, {{"other", "layers.0.mlp.up_proj.weight"}}},
      {kInputBufferReused, {{"read", 2}}},
      {kWrongBetweenStages, {{"last_right", "gradient at layers.1.norm (step 0)"}}},
      {kValuesOfMicroBatch, {{"other", 0}}},
      {kMasksOfMicroBatch, {{"other", 0}}},
      {kMasksOfSamples, {{"other", 0}, {"first_others", "2, 3"}}},
      {kRowsNotUpdated, {{"runs", "0..7"}}},
      {kColumnsNotUpdated, {{"runs", "0..7"}}},
      {kRunNotUpdated, {{"which", "elements 0..255"}}},
      {kElementsNotUpdated, {{"kept", 12}}},
      {kDecayWithRateOfSettings, {{"used", 0.01}}},
      {kDecayWithRateOfStep, {{"used", 0.002}}},
      {kDecayAppliedTimes, {{"times", 1.37}}},
      {kPartsOutOfOrder,
       {{"where", "tp ranks 0, 1"}, {"parts", Ints{1, 0}}, {"expected", Ints{0, 1}}}},
      {kShardsOfOtherRank, {{"coordinate", 0}}},
      {kCutAsOneBlock, {{"slices", "rows"}, {"first", 48}, {"last", 95}, {"sections", 3}}},
      {kCutAsOneWithOther,
       {{"first", 0},
        {"last", 63},
        {"holder", "layers.1.mlp.up_proj.weight"},
        {"other", "layers.1.mlp.gate_proj.weight"}}},
      {kNotSlices, {{"what", "shards"}}},
      {kUpdateWithRateOfStep, {{"before", "update "}, {"scale", 0.5}}},
      {kSamplesMissing, {{"num_rows", 8}}},
      {kInputSideOnly, {{"num_rows", 73}}},
      {kMixedDtypes, {{"dtypes", "bf16 on rank 1, fp32 on rank 0"}}},
      {kStateInOtherDtype, {{"state", "layers.1.mlp.up_proj.weight.exp_avg"}}},
      {kParameterAddedTimes, {{"factor", 1}, {"parameter", "layers.1.mlp.down_proj.bias"}}},
      {kParameterNotAdded, {{"factor", -1}, {"parameter", "layers.1.mlp.down_proj.bias"}}},
      {kPositionsRestart, {{"places", "4..11"}}},
      {kWrongWithForeignKeys, {{"where", "cp rank 1"}}},
      {kOtherBase, {{"base", 500000}, {"right", 10000}, {"percent", 80}}},
      {kLastTargetsMissing, {{"positions", Ints{3, 11}}}},
      {kRepeatedIdsNotSummed, {{"num_rows", 6}, {"which", "the last"}}},
      {kRepeatedIdsAveraged, {{"num_rows", 6}}},
      {kRowAddedToForeignIds, {{"parameter", "embed_tokens.weight"}}},
      {kRowsOfOtherIds,
       {{"first", 48}, {"last", 90}, {"away", 1}, {"parameter", "embed_tokens.weight"}}},
      {kForeignTargetsNotMasked, {{"column", 0}}},
      {kLogitRowsNotZero, {{"num_rows", 24}}},
      {kTargetNotSubtracted, {{"num_rows", 24}}},
      {kSoftmaxOfOwnColumns, {{"num_rows", 24}}},
      {kUncountedTokens, {{"num_tokens", 2}}},
      {kRecomputedActivationsDiffer, {{"wrong", 3}, {"all", 24}}},
      {kNotRepeatable, {{"run", 2}, {"subject", "fsdp"}}},
      {kNoCallAlongAxis, {{"calls", 4}, {"first", "all_reduce of 96 elements"}}},
      {kCallMadeAgain, {{"call", 3}}},
      {kTensorsExchanged,
       {{"first", "layers.1.mlp.gate_proj.weight"}, {"second", "layers.1.mlp.up_proj.weight"}}},
      {kEqualsOtherTensor, {{"tensor", "layers.1.mlp.up_proj.weight"}}},
      {kHalvesExchanged, {{"order", Ints{1, 0}}}},
      {kPartsInOtherOrder, {{"parts", 3}, {"order", Ints{0, 2, 1}}}},
      {kGivenCause, {{"problem", "gradients are reduced in bf16; the reference has no reduction"}}},
      {kOwnSamplesOnEachRank, {{"samples", 8}}},
      {kBatchStatistics, {{"module", "norm"}, {"modules", 1}}},
      {kMeanOfOwnLabels, {{"least", 24}, {"most", 72}}},
      {kFunctionWrong, {{"tensor", "forward layers.1.mlp@softmax"}}},
      {kSamplesForeign, {{"foreign", 2}}},
      {kStepWithoutForward, {{"step", 2}, {"before", 1}}},
      {kStepSkipped, {{"steps", Ints{0, 1}}}},
  };
  return kOwn;
}

}  // namespace

NamedValues readable_examples_of(CauseId id) {
  const auto own = std::ranges::find(own_examples(), id, &CauseExamples::id);
  NamedValues values;
  for (const Placeholder& place : placeholders_in(row_of(id).text)) {
    if (place.is_optional || find_value(values, place.name) != nullptr) continue;
    const IdValue* value =
        own == own_examples().end() ? nullptr : find_value(own->values, place.name);
    if (value == nullptr) value = find_value(common_examples(), place.name);
    if (value != nullptr)
      values.emplace_back(place.name, *value);
    else
      values.emplace_back(place.name, fmt::format("<{}>", place.name));
  }
  return values;
}

}  // namespace isoshard
