// SPDX-License-Identifier: Apache-2.0
/// Each pattern of divergence on made-up runs with dp 2 and tp 3, and none where none fits.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "harness/causes/diagnosis.h"
#include "harness/ids/phrase.h"
#include "harness/judge/judge.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::AllOf;

/// The verdict on one replicated tensor of which rank r holds make(reference value, dp, tp), within
/// 1e-6.
Verdict verdict_of(const at::Tensor& value, RecordKind kind,
                   const std::function<at::Tensor(at::Tensor, int dp_rank, int tp_rank)>& make,
                   const std::vector<Placement>& placements = {}) {
  const Layout layout = layout_of(value.sizes().vec(), placements);
  const Reference r =
      reference([&](Sink& sink, int) { sink.on_record(site(kind, "t", layout), value); });
  const Trace trace = run(kDp2Tp3, &r, [&](Sink& sink, int rank) {
    sink.on_record(site(kind, "t", layout), make(value, rank / 3, rank % 3));
  });
  JudgePolicy options;
  options.rtol = 1e-6;
  return judge(r, trace, options);
}

Cause first_cause_of(const at::Tensor& value,
                     const std::function<at::Tensor(at::Tensor, int dp_rank, int tp_rank)>& make,
                     RecordKind kind = RecordKind::kActivation,
                     const std::vector<Placement>& placements = {}) {
  const Verdict verdict = verdict_of(value, kind, make, placements);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.at(0).cause;
}

TEST(Diagnosis, APartialSumOverTp) {
  const at::Tensor value = values({4, 6}, 1);
  const at::Tensor parts[] = {values({4, 6}, 2), values({4, 6}, 3)};

  const Cause cause = first_cause_of(
      value,
      [&](at::Tensor v, int, int tp) { return tp < 2 ? parts[tp] : v - parts[0] - parts[1]; },
      RecordKind::kActivationGrad);

  EXPECT_THAT(cause, IsCause(CauseId::kRankLocalPartial,
                             {{"axis", "tp"}, {"copies", 3}, {"axes", std::vector{"tp"}}}));
}

TEST(Diagnosis, UnreducedGradientsOverDp) {
  const at::Tensor value = values({4, 6}, 1);
  const at::Tensor delta = values({4, 6}, 2);

  const Cause mean = first_cause_of(
      value, [&](at::Tensor v, int dp, int) { return dp == 0 ? v + delta : v - delta; },
      RecordKind::kGrad);
  const Cause weighted = first_cause_of(
      value, [&](at::Tensor v, int dp, int) { return dp == 0 ? v + delta : v - 3 * delta; },
      RecordKind::kGrad);

  EXPECT_THAT(mean, IsCause(CauseId::kRankLocal,
                            {{"axis", "dp"}, {"copies", 2}, {"axes", std::vector{"dp"}}}));
  EXPECT_THAT(weighted, IsCause(CauseId::kRankLocal, {{"axis", "dp"}, {"copies", 2}}))
      << "unequal token counts: weights 3/4 and 1/4";
}

TEST(Diagnosis, TheSameCauseForEveryGradientIsSaidOnceForAll) {
  const Body whole = [](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({8})), values({8}, 9));
    for (int i = 0; i < 3; ++i)
      sink.on_record(site(RecordKind::kGrad, fmt::format("w{}", i), layout_of({8})),
                     values({8}, i));
  };
  const Reference r = reference(whole);
  const Trace trace = run(kDp2Tp3, &r, [](Sink& sink, int rank) {
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({8})), values({8}, 9));
    for (int i = 0; i < 3; ++i) {
      sink.on_record(site(RecordKind::kGrad, fmt::format("w{}", i), layout_of({8})),
                     values({8}, i) + (rank < 3 ? 1 : -1) * values({8}, 50 + i));
    }
  });
  JudgePolicy options;
  options.rtol = 1e-6;

  const Verdict verdict = judge(r, trace, options);

  const Finding& first = verdict.findings.at(0);
  EXPECT_THAT(first.cause, IsCause(CauseId::kRankLocal, {{"axis", "dp"},
                                                         {"copies", 2},
                                                         {"axes", std::vector{"dp"}},
                                                         {"same", 3},
                                                         {"same_of", 3},
                                                         {"forward", "exact"}}));
  EXPECT_EQ(first.diagnosis, phrase(PhraseId::kOfAllGradients, {{"cause", first.cause.text}}) +
                                 phrase(PhraseId::kForwardExact));
}

TEST(Diagnosis, IsTheTextOfTheCauseWithTheNameOfItsTensor) {
  const Verdict verdict = verdict_of(values({4, 6}, 1), RecordKind::kGrad,
                                     [](at::Tensor v, int, int) { return v * 1.37; });

  const Finding& first = verdict.findings.at(0);
  EXPECT_EQ(first.diagnosis, phrase(PhraseId::kCauseOf, {{"tensor", subject_of(first.key)},
                                                         {"cause", first.cause.text}}));
}

TEST(Diagnosis, AScaleNamesItsFormula) {
  const at::Tensor value = values({4, 6}, 1);
  const auto scaled = [&](double factor) {
    return first_cause_of(
        value, [=](at::Tensor v, int, int) { return v * factor; }, RecordKind::kGrad);
  };

  EXPECT_THAT(scaled(3), IsCause(CauseId::kScaleOfFormula, {{"formula", "tp"}, {"scale", 3}}));
  EXPECT_THAT(scaled(0.5),
              IsCause(CauseId::kScaleOfFormula, {{"formula", "1/dp"}, {"scale", 0.5}}));
  EXPECT_THAT(scaled(2), IsCause(CauseId::kScaleOfFormula, {{"formula", "dp"}, {"scale", 2}}));
  EXPECT_THAT(scaled(1.0 / 3),
              IsCause(CauseId::kScaleOfFormula, {{"formula", "1/tp"}, {"scale", 0.33333}}));
  EXPECT_THAT(scaled(6), IsCause(CauseId::kScaleOfFormula, {{"formula", "dp x tp"}, {"scale", 6}}));
  EXPECT_THAT(scaled(1.37),
              AllOf(IsCause(CauseId::kScale, {{"scale", 1.37}}), HasNoValue("ranks")));
  EXPECT_THAT(
      first_cause_of(
          value, [](at::Tensor v, int, int tp) { return tp == 1 ? v * 3 : v; }, RecordKind::kGrad),
      IsCause(CauseId::kScaleOfFormula,
              {{"formula", "tp"}, {"scale", 3}, {"ranks", std::vector{1, 4}}}));
}

TEST(Diagnosis, StagesOfAPipelineStandInNoCompound) {
  const at::Tensor value = values({4, 6}, 1);
  const auto scaled = [&](Axis axis, double factor) {
    const auto gradient = [&](double by) {
      return [&value, by](Sink& sink, int) {
        sink.on_record(site(RecordKind::kGrad, "t", layout_of({4, 6})), value * by);
      };
    };
    const Reference r = reference(gradient(1));
    const Trace trace = run(MeshShape({{axis, 2}}), &r, gradient(factor));
    JudgePolicy options;
    options.rtol = 1e-6;
    return judge(r, trace, options).findings.at(0).cause;
  };

  EXPECT_THAT(scaled(Axis::kDp, 4),
              AllOf(IsCause(CauseId::kScaleOfFormula, {{"formula", "dp^2"}, {"scale", 4}}),
                    HasNoValue("ranks")));
  EXPECT_THAT(scaled(Axis::kPp, 4),
              AllOf(IsCause(CauseId::kScale, {{"scale", 4}}), HasNoValue("ranks")))
      << "rather micro-batches";
  EXPECT_THAT(scaled(Axis::kPp, 2),
              AllOf(IsCause(CauseId::kScaleOfFormula, {{"formula", "pp"}, {"scale", 2}}),
                    HasNoValue("ranks")));
}

TEST(Diagnosis, ARateKnowsNoMesh) {
  const auto body = [](double factor) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kScalar, "learning_rate", layout_of({1})),
                     at::full({1}, 0.01 * factor, at::kDouble));
    });
  };
  const Reference r = reference(body(1));

  const Verdict verdict = judge(r, run(kDp2Tp3, &r, body(3)), {});

  ASSERT_EQ(kDp2Tp3.degree(Axis::kTp), 3);
  EXPECT_THAT(verdict.findings.at(0).cause, IsCause(CauseId::kScale, {{"scale", 3}}));
}

TEST(Diagnosis, PositionsHeldTwice) {
  const at::Tensor value = values({4, 24, 5}, 1);

  const Cause cause = first_cause_of(
      value,
      [](at::Tensor v, int dp_rank, int tp_rank) {
        const at::Tensor half = v.narrow(0, 2 * dp_rank, 2).narrow(1, tp_rank == 1 ? 12 : 0, 12);
        return tp_rank == 2 ? v.narrow(0, 2 * dp_rank, 2) : at::cat({half, half}, 1);
      },
      RecordKind::kActivation, {shard(Axis::kDp, 0)});

  EXPECT_THAT(cause, IsCause(CauseId::kSlicesRepeated, {{"rank", 0},
                                                        {"dim", 1},
                                                        {"first", 0},
                                                        {"ranks", std::vector{0, 1}},
                                                        {"axes", std::vector{"tp"}},
                                                        {"last", 11},
                                                        {"times", 2},
                                                        {"begins", std::vector{0, 12}},
                                                        {"ends", std::vector{11, 23}}}));
}

TEST(Diagnosis, ShiftsAndPermutations) {
  const at::Tensor value = values({4, 9, 5}, 1);

  EXPECT_THAT(first_cause_of(value, [](at::Tensor v, int, int) { return v.roll(2, 1); }),
              IsCause(CauseId::kSlicesShifted, {{"shift", 2}, {"dim", 1}}));
  EXPECT_THAT(
      first_cause_of(value,
                     [](at::Tensor v, int, int) {
                       return v.index_select(1, at::tensor({1, 0, 3, 2, 5, 4, 7, 6, 8}, at::kLong));
                     }),
      IsCause(CauseId::kSlicesPermuted, {{"slices", "tokens"},
                                         {"block", 1},
                                         {"order", std::vector{1, 0, 3, 2, 5, 4, 7, 6, 8}},
                                         {"dim", 1}}));
  EXPECT_THAT(first_cause_of(value,
                             [](at::Tensor v, int, int) {
                               return v.transpose(0, 2).contiguous().reshape({4, 9, 5});
                             }),
              IsCause(CauseId::kSameValuesElsewhere));
}

TEST(Diagnosis, OffsetsOfAConstantAndOfARow) {
  const at::Tensor value = values({4, 6, 5}, 1);
  const at::Tensor row = values({5}, 2);

  EXPECT_THAT(first_cause_of(value, [](at::Tensor v, int, int) { return v + 0.25; }),
              IsCause(CauseId::kConstantOffset, {{"offset", 0.25}}));
  EXPECT_THAT(first_cause_of(value, [&](at::Tensor v, int, int) { return v + row; }),
              IsCause(CauseId::kSameRowAdded));
}

TEST(Diagnosis, AParameterThatWasNotUpdated) {
  const auto body = [](bool updated) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kParam, "w", layout_of({8})), values({8}, 1));
      sink.on_record(site(RecordKind::kParam, "w", layout_of({8})), values({8}, updated ? 2 : 1));
    });
  };
  const Reference r = reference(body(true));
  JudgePolicy options;
  options.rtol = 1e-6;

  const Verdict verdict = judge(r, run(kDp2Tp3, &r, body(false)), options);

  EXPECT_THAT(verdict.findings.at(0).cause, IsCause(CauseId::kNotUpdated));
}

// A rank's rows are filled up; of the step only its own ones count.
TEST(Diagnosis, TheStepOfRowsThatPaddingFollows) {
  const at::Tensor before = values({5, 4}, 1), after = values({5, 4}, 2);
  const auto body = [&](double factor) {
    return Body([=](Sink& sink, int rank) {
      const std::int64_t begin = 2 * (rank % 3), count = std::min<std::int64_t>(2, 5 - begin);
      Layout layout = layout_of({5, 4});
      layout.boxes = {Box{{0, 0}, {begin, 0}, {count, 4}}};
      layout.explicit_parts = true;
      for (const at::Tensor& whole : {before, before + (after - before) * factor})
        sink.on_record(site(RecordKind::kParam, "w", layout),
                       at::constant_pad_nd(whole.narrow(0, begin, count), {0, 0, 0, 2 - count}));
    });
  };
  const Reference r = reference([&](Sink& sink, int) {
    for (const at::Tensor& whole : {before, after})
      sink.on_record(site(RecordKind::kParam, "w", layout_of({5, 4})), whole);
  });
  JudgePolicy options;
  options.rtol = 1e-6;

  const Verdict verdict = judge(r, run(kDp2Tp3, &r, body(3)), options);

  ASSERT_EQ(kDp2Tp3.degree(Axis::kTp), 3);
  EXPECT_THAT(
      verdict.findings.at(0).cause,
      IsCause(CauseId::kScaleOfFormula, {{"formula", "tp"}, {"scale", 3}, {"is_update", true}}));
}

TEST(Diagnosis, AFactorNextToOneSaysHowFar) {
  const at::Tensor value = values({4, 6, 5}, 1);

  EXPECT_THAT(first_cause_of(value, [](at::Tensor v, int, int) { return v * (1 + 1e-5); }),
              IsCause(CauseId::kScaleNearOne, {{"sign", "+"}, {"away", 1.001e-05}}));
  EXPECT_THAT(first_cause_of(value, [](at::Tensor v, int, int) { return v * (1 - 1e-5); }),
              IsCause(CauseId::kScaleNearOne, {{"sign", "-"}, {"away", 1.001e-05}}));
}

TEST(Diagnosis, ALastBitIsNoFactor) {
  const at::Tensor value = values({4, 6}, 1, at::kDouble);
  const auto record = [&](double difference) {
    return [&value, difference](Sink& sink, int) {
      at::Tensor changed = value.clone();
      changed.select(0, 0).select(0, 0) += difference;
      sink.on_record(site(RecordKind::kGrad, "t", layout_of({4, 6})), changed);
    };
  };
  const Reference r = reference(record(0));
  JudgePolicy options;
  options.level = Level::kExact;

  const Verdict verdict = judge(r, run(kDp2Tp3, &r, record(0x1p-52)), options);

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0).cause, IsNoCause());
}

TEST(Diagnosis, AValueOfTheStepBefore) {
  const auto body = [](int second) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kActivation, "x", layout_of({8})), values({8}, 1));
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kActivation, "x", layout_of({8})), values({8}, second));
    });
  };
  const Reference r = reference(body(2));
  JudgePolicy options;
  options.rtol = 1e-6;

  const Verdict verdict = judge(r, run(kDp2Tp3, &r, body(1)), options);

  EXPECT_THAT(verdict.findings.at(0).cause, IsCause(CauseId::kStaleBySteps, {{"steps", 1}}));
}

TEST(Diagnosis, CopiesThatDifferWithoutAPattern) {
  const at::Tensor value = values({4, 6}, 1);

  const Cause cause = first_cause_of(value, [](at::Tensor v, int, int tp) {
    return tp == 2 ? values({4, 6}, 40) : v;
  });

  EXPECT_THAT(cause, IsCause(CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"tp"}}}));
}

TEST(Diagnosis, NothingIsSaidOfAnUnrelatedTensor) {
  const at::Tensor value = values({4, 6}, 1);

  const Cause cause = first_cause_of(value, [](at::Tensor, int, int) {
    return values({4, 6}, 40);
  });

  EXPECT_THAT(cause, IsNoCause());
}

// The mean of log(sum) where every rank had all of what was summed; log(ratio) where padding was
// summed too.
TEST(Diagnosis, ALossThatIsTooLargeByTheLogarithmOfADegree) {
  const at::Tensor loss = at::full({1}, 4.5, at::kDouble);
  const auto with_offset = [&](double offset) {
    return first_cause_of(
        loss, [&](at::Tensor v, int, int) { return v + offset; }, RecordKind::kScalar);
  };

  EXPECT_THAT(with_offset(std::log(3.0)),
              IsCause(CauseId::kOffsetOfDegree, {{"offset", 1.0986}, {"axis", "tp"}}));
  EXPECT_THAT(with_offset(std::log(2.0)),
              IsCause(CauseId::kOffsetOfDegree, {{"offset", 0.6931}, {"axis", "dp"}}));
  EXPECT_THAT(with_offset(1.05), IsOnlyOff());
}

// A search through all patterns would take minutes. The large tensor, one element of which is 0,
// has a cause that the small one does not have.
TEST(Diagnosis, ALargeTensorIsSearchedOnlyForWhatSmallOnesShow) {
  const at::Tensor small = values({64}, 1), delta = values({64}, 2),
                   large = at::ones({detail::kLargeTensor + 1}, at::kHalf);
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor own = rank == 0 ? small + delta : small - delta;
      sink.on_record(site(RecordKind::kGrad, "small", layout_of({64})), whole ? small : own);
      at::Tensor all_but_one = whole ? large : large.clone();
      if (!whole) all_but_one.narrow(0, 5, 1).zero_();
      sink.on_record(site(RecordKind::kGrad, "large", layout_of({large.numel()})), all_but_one);
    });
  };
  const Reference right = reference(body(true));
  const Trace wrong = run(MeshShape({{Axis::kDp, 2}}), &right, body(false));
  JudgePolicy policy;
  policy.rtol = 1e-6;

  const Verdict verdict = judge(right, wrong, policy);

  ASSERT_EQ(verdict.findings.size(), 2U);
  EXPECT_THAT(verdict.findings[0].cause, IsCause(CauseId::kRankLocal, {{"axis", "dp"}}));
  EXPECT_THAT(verdict.findings[1].cause, IsNoCause());
}

}  // namespace
}  // namespace isoshard
