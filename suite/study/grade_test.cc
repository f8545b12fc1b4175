// SPDX-License-Identifier: Apache-2.0
/// A cause is right where it names the operator, its number and its place, and a cause of anything
/// else is wrong.
#include "suite/study/grade.h"

#include <gtest/gtest.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "suite/faults/fault.h"

namespace isoshard {
namespace {

/// On tp rank 1 of dp 2 and tp 2: tp is the fast axis.
constexpr std::array kTpRank1 = {1, 3};
constexpr std::array kAllRanks = {0, 1, 2, 3};

Injection scaled(FaultExtent extent = FaultExtent::kAll) {
  return {.point = FaultPoint::kForward,
          .name = "model.layers.0.mlp",
          .change = FaultChange::kScale,
          .extent = extent,
          .magnitude = 0.01,
          .ranks = FaultRanks{Axis::kTp, 1}};
}

Injection skipped(Purpose purpose) {
  return {.point = FaultPoint::kCollective,
          .called = {CollectiveOp::kAllReduce, purpose, Axis::kDp},
          .change = FaultChange::kSkip};
}

CauseGrade on_tp_rank_1(const Injection& c, CauseId id, NamedValues values = {}) {
  return grade_of(c, kTpRank1, {true, {1, 3}, {id, std::move(values)}});
}

CauseGrade on_all_ranks(const Injection& c, CauseId id, NamedValues values = {}) {
  return grade_of(c, kAllRanks, {std::nullopt, {0, 1, 2, 3}, {id, std::move(values)}});
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
  EXPECT_EQ(on_tp_rank_1(scaled(FaultExtent::kPart), CauseId::kScale, {{"scale", 1.01}}),
            CauseGrade::kWrong);

  Injection zero = scaled(FaultExtent::kElement);
  zero.change = FaultChange::kZero;
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kZeros, {{"zeros", 2}}), CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kZeros, {{"zeros", 3}}), CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kNotUpdated), CauseGrade::kWrong);
  zero.point = FaultPoint::kUpdate;
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kRunNotUpdated, {{"first", 7}, {"last", 7}}),
            CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kRunNotUpdated, {{"first", 7}, {"last", 8}}),
            CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(zero, CauseId::kNotUpdated), CauseGrade::kWrong) << "all of it";

  Injection rounded = scaled();
  rounded.change = FaultChange::kRound;
  EXPECT_EQ(on_tp_rank_1(rounded, CauseId::kRounded, {{"dtype", "bf16"}}), CauseGrade::kRight);
  EXPECT_EQ(on_tp_rank_1(rounded, CauseId::kRounded, {{"dtype", "fp16"}}), CauseGrade::kWrong);
}

TEST(CauseGrade, OfASkippedReductionNeedsItsAxis) {
  const Injection grads = skipped(Purpose::kGradReduce), norm = skipped(Purpose::kClipNorm);
  EXPECT_EQ(on_all_ranks(grads, CauseId::kRankLocalPartial, {{"axis", "dp"}}), CauseGrade::kRight);
  EXPECT_EQ(on_all_ranks(grads, CauseId::kRankLocalPartial, {{"axis", "tp"}}), CauseGrade::kWrong);
  EXPECT_EQ(on_all_ranks(norm, CauseId::kSquaresNotSummed, {{"axis", "dp"}}), CauseGrade::kRight);
  EXPECT_EQ(on_all_ranks(grads, CauseId::kSquaresNotSummed, {{"axis", "dp"}}), CauseGrade::kWrong)
      << "of a call that carries gradients";
  EXPECT_EQ(on_all_ranks(grads, CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"dp"}}}),
            CauseGrade::kPlaceOnly);
  EXPECT_EQ(
      on_all_ranks(grads, CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"dp", "tp"}}}),
      CauseGrade::kWrong);
}

TEST(CauseGrade, OfACallTakesWhatTheRecordMakesOfIt) {
  const Injection sum{
      .point = FaultPoint::kCollective,
      .called = {CollectiveOp::kAllReduce, Purpose::kVocabParallelLogsumexp, Axis::kTp},
      .magnitude = 2};
  EXPECT_EQ(on_all_ranks(sum, CauseId::kOffsetOfDegree, {{"offset", 1.0986}, {"axis", "tp"}}),
            CauseGrade::kRight);
  EXPECT_EQ(on_all_ranks(sum, CauseId::kOffsetOfDegree, {{"offset", 0.6931}, {"axis", "tp"}}),
            CauseGrade::kWrong);
  const Injection squares{.point = FaultPoint::kCollective,
                          .called = {{}, Purpose::kClipNorm, Axis::kTp},
                          .side = FaultSide::kGiven,
                          .change = FaultChange::kZero,
                          .ranks = FaultRanks{Axis::kTp, 0, /*are_others=*/true}};
  EXPECT_EQ(on_all_ranks(squares, CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 0}}),
            CauseGrade::kRight);
  EXPECT_EQ(on_all_ranks(squares, CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 1}}),
            CauseGrade::kWrong);
}

TEST(CauseGrade, OfOneNumberTakesAFactorAndAnOffsetAsAlternatives) {
  Injection loss = scaled();
  loss.point = FaultPoint::kCollective;
  loss.called = {CollectiveOp::kAllReduce, Purpose::kLossReduce, Axis::kDp};
  loss.ranks = {};
  const NamedValues off = {{"offset", 0.0458}, {"scale", 1.01}};
  EXPECT_EQ(on_all_ranks(loss, CauseId::kNumberOff, off), CauseGrade::kRight);
  EXPECT_EQ(on_all_ranks(loss, CauseId::kNumberOff, {{"offset", 0.09}, {"scale", 1.02}}),
            CauseGrade::kPlaceOnly);
  loss.change = FaultChange::kNoise;
  EXPECT_EQ(on_all_ranks(loss, CauseId::kNumberOff, off), CauseGrade::kPlaceOnly);
  loss.called.purpose = Purpose::kClipNorm;
  loss.change = FaultChange::kZero;
  EXPECT_EQ(on_all_ranks(loss, CauseId::kSquaresLeftOut, {{"num_parameters", 1}}),
            CauseGrade::kWrong)
      << "all squares are left out";
  loss.extent = FaultExtent::kElement;
  EXPECT_EQ(on_all_ranks(loss, CauseId::kSquaresLeftOut, {{"num_parameters", 1}}),
            CauseGrade::kRight);
  loss.change = FaultChange::kScale;
  EXPECT_EQ(on_all_ranks(loss, CauseId::kSquaresCountedTwice, {{"num_parameters", 1}}),
            CauseGrade::kWrong)
      << "they are scaled by 1.01";
  loss.magnitude = 1;
  EXPECT_EQ(on_all_ranks(loss, CauseId::kSquaresCountedTwice, {{"num_parameters", 1}}),
            CauseGrade::kRight);
}

// The norm is added up over dp and then over tp, so a wrong sum of some ranks reaches all.
TEST(CauseGrade, OfANumberThatIsReducedOverTwoAxesMayNameAllRanks) {
  Injection sum = scaled();
  sum.point = FaultPoint::kCollective;
  sum.change = FaultChange::kShift;
  sum.called = {CollectiveOp::kAllReduce, Purpose::kClipNorm, Axis::kDp};
  const auto grade = [&] {
    return grade_of(sum, kTpRank1, {std::nullopt, {0, 1, 2, 3}, {CauseId::kNumberOff, {}}});
  };
  EXPECT_EQ(grade(), CauseGrade::kPlaceOnly);
  sum.called.purpose = Purpose::kGradReduce;
  EXPECT_EQ(grade(), CauseGrade::kWrong);
}

TEST(CauseGrade, OfCopiesOfWhichAnyMayBeWrongIsThePlaceOnAnyRank) {
  const NamedValues axes = {{"axes", std::array{"tp"}}};
  const auto on_ranks_0_and_2 = [&](CauseId id) {
    return grade_of(scaled(), kTpRank1, {true, {0, 2}, {id, axes}});
  };
  EXPECT_EQ(on_ranks_0_and_2(CauseId::kEitherCopyWrong), CauseGrade::kPlaceOnly);
  EXPECT_EQ(on_ranks_0_and_2(CauseId::kCopiesDifferOverAxes), CauseGrade::kWrong);
}

TEST(CauseGrade, OfNoiseIsAtMostThePlace) {
  Injection noise = scaled();
  noise.change = FaultChange::kNoise;
  for (const CauseId id : all_ids<CauseId>())
    EXPECT_NE(on_tp_rank_1(noise, id, {{"scale", 1.01}, {"axis", "tp"}}), CauseGrade::kRight)
        << name_of(id);
  EXPECT_EQ(on_tp_rank_1(noise, CauseId::kScale, {{"scale", 1.01}}), CauseGrade::kWrong);
  EXPECT_EQ(on_tp_rank_1(noise, CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"tp"}}}),
            CauseGrade::kPlaceOnly);
  EXPECT_EQ(on_tp_rank_1(noise, CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"dp"}}}),
            CauseGrade::kWrong);
}

// What the catalog expects of a bug is what the bug's data says.
TEST(CauseGrade, OfTheCatalogIsRight) {
  int graded = 0;
  for (const Fault& fault : fault_catalogue()) {
    if (fault.injections.size() != 1 || fault.injections.front().point > FaultPoint::kUpdate)
      continue;
    const Case item = fault.smallest_case();
    const Injection injection = with_numbers_of(item, fault.injections.front());
    std::vector<int> wrong_ranks;  // what a rank gives reaches all
    for (int rank = 0; rank < item.world_size(); ++rank)
      if (injection.side == FaultSide::kGiven || injection.is_on(item.mesh(), rank))
        wrong_ranks.push_back(rank);
    const Cause cause = {fault.expected->cause.id, fault.expected->cause.values};

    const CauseGrade grade =
        grade_of(injection, wrong_ranks, {std::nullopt, fault.expected->ranks, cause});

    // its cause says only that other values came than were sent
    const bool is_place = fault.id == "stage_output_freed_before_send";
    EXPECT_EQ(name_of(grade), name_of(is_place ? CauseGrade::kPlaceOnly : CauseGrade::kRight))
        << fault.id;
    ++graded;
  }
  EXPECT_GE(graded, 20);
}

TEST(CauseGrade, OfNoCauseIsNone) {
  EXPECT_EQ(grade_of(scaled(), kTpRank1, {false, {0}, {}}), CauseGrade::kNone);
  EXPECT_EQ(on_tp_rank_1(scaled(), CauseId::kNone), CauseGrade::kNone);
}

}  // namespace
}  // namespace isoshard
