// SPDX-License-Identifier: Apache-2.0
/// A cause is right where it names the operator, its number and its place, and a cause of anything
/// else is wrong.
#include "suite/study/grade.h"

#include <gtest/gtest.h>

#include <array>
#include <string_view>
#include <utility>

namespace isoshard {
namespace {

/// On tp rank 1 of dp 2 and tp 2: tp is the fast axis.
constexpr std::array kTpRank1 = {1, 3};
constexpr std::array kAllRanks = {0, 1, 2, 3};

Composition scaled(StudyExtent extent = StudyExtent::kAll) {
  return {.point = StudyPoint::kForward,
          .tag = "model.layers.0.mlp",
          .change = StudyChange::kScale,
          .extent = extent,
          .magnitude = 0.01,
          .axis = Axis::kTp,
          .coordinate = 1};
}

Composition skipped(Purpose purpose) {
  return {.point = StudyPoint::kCollective,
          .called = {CollectiveOp::kAllReduce, purpose, Axis::kDp},
          .change = StudyChange::kSkip};
}

CauseGrade on_tp_rank_1(const Composition& c, CauseId id, NamedValues values = {}) {
  return grade_of(c, kTpRank1, {true, {1, 3}, make_cause(id, std::move(values))});
}

CauseGrade on_all_ranks(const Composition& c, CauseId id, NamedValues values = {}) {
  return grade_of(c, kAllRanks, {std::nullopt, {0, 1, 2, 3}, make_cause(id, std::move(values))});
}

TEST(CauseGrade, NeedsTheNumber) {
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kScale, {{"scale", 1.0104}}), CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kScaleNearOne, {{"scale", 1.0096}}),
            CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kScale, {{"scale", 1.012}}), CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kScale, {{"scale", 0.99}}), CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kScale), CauseGrade::kWrong) << "no number";
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kFactorPerRank,
                         {{"axis", "tp"}, {"factors", std::array{1.0, 1.01}}}),
            CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kFactorPerRank,
                         {{"axis", "tp"}, {"factors", std::array{1.01, 1.0}}}),
            CauseGrade::kWrong);
}

TEST(CauseGrade, NeedsTensorAndRanks) {
  const Cause scale = make_cause(CauseId::kScale, {{"scale", 1.01}});
  EXPECT_EQ(grade_of(scaled(), kTpRank1, {true, {3}, scale}), CauseGrade::kRight)
      << "a rank may hold no part of it";
  EXPECT_EQ(grade_of(scaled(), kTpRank1, {true, {0, 1}, scale}), CauseGrade::kWrong);
  EXPECT_EQ(grade_of(scaled(), kTpRank1, {false, {1, 3}, scale}), CauseGrade::kWrong);
}

TEST(CauseGrade, NeedsTheOperatorAndItsExtent) {
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kConstantOffset, {{"offset", 0.01}}),
            CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kStaleBySteps, {{"steps", 1}}), CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(scaled(StudyExtent::kPart), CauseId::kScale, {{"scale", 1.01}}),
            CauseGrade::kWrong);

  Composition zero = scaled(StudyExtent::kElement);
  zero.change = StudyChange::kZero;
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kZeros, {{"zeros", 2}}), CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kZeros, {{"zeros", 3}}), CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kNotUpdated), CauseGrade::kWrong);
  zero.point = StudyPoint::kUpdate;
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kRunNotUpdated, {{"first", 7}, {"last", 7}}),
            CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kRunNotUpdated, {{"first", 7}, {"last", 8}}),
            CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kNotUpdated), CauseGrade::kWrong) << "all of it";

  Composition rounded = scaled();
  rounded.change = StudyChange::kRound;
  EXPECT_EQ(on_tp_rank_1(rounded, CauseId::kRounded, {{"dtype", "bf16"}}), CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(rounded, CauseId::kRounded, {{"dtype", "fp16"}}), CauseGrade::kWrong);
}

TEST(CauseGrade, OfASkippedReductionNeedsItsAxis) {
  const Composition grads = skipped(Purpose::kGradReduce), norm = skipped(Purpose::kClipNorm);
  EXPECT_EQ(on_all_ranks(grads, CauseId::kRankLocalPartial, {{"axis", "dp"}}), CauseGrade::kRight);
  EXPECT_EQ(on_all_ranks(grads, CauseId::kRankLocalPartial, {{"axis", "tp"}}), CauseGrade::kWrong);
  EXPECT_EQ(on_all_ranks(norm, CauseId::kSquaresNotSummed, {{"axis", "dp"}}), CauseGrade::kRight);
  EXPECT_EQ(on_all_ranks(grads, CauseId::kSquaresNotSummed, {{"axis", "dp"}}), CauseGrade::kWrong)
      << "of a call that carries gradients";
  EXPECT_EQ(on_all_ranks(grads, CauseId::kCopiesDiffer, {{"axes", "dp"}}), CauseGrade::kPlaceOnly);
  EXPECT_EQ(on_all_ranks(grads, CauseId::kCopiesDiffer, {{"axes", "dp and tp"}}),
            CauseGrade::kWrong);
}

TEST(CauseGrade, OfNoiseIsAtMostThePlace) {
  Composition noise = scaled();
  noise.change = StudyChange::kNoise;
  for (const CauseId id : all_ids<CauseId>())
    EXPECT_NE(on_tp_rank_1(noise, id, {{"scale", 1.01}, {"axis", "tp"}}), CauseGrade::kRight)
        << name_of(id);
  EXPECT_EQ(on_tp_rank_1(noise, CauseId::kScale, {{"scale", 1.01}}), CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(noise, CauseId::kCopiesDiffer, {{"axes", "tp"}}), CauseGrade::kPlaceOnly);
  EXPECT_EQ(on_tp_rank_1(noise, CauseId::kCopiesDiffer, {{"axes", "dp"}}), CauseGrade::kWrong);
}

TEST(CauseGrade, OfNoCauseIsNone) {
  EXPECT_EQ(grade_of(scaled(), kTpRank1, {false, {0}, {}}), CauseGrade::kNone);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kNone), CauseGrade::kNone);
}

}  // namespace
}  // namespace isoshard
