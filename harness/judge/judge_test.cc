// SPDX-License-Identifier: Apache-2.0
/// Claims about verdicts, each in both directions: what is right conforms, what is wrong does not.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "harness/judge/judge.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::ElementsAre;

/// A tiny step: ids, a weight, an activation split over dp and tp, gradients and the weight after
/// the step.
struct Step {
  at::Tensor ids = at::arange(8, at::kLong).reshape({4, 2});
  at::Tensor weight = values({6, 4}, 1);
  at::Tensor activation = values({4, 6}, 2);
  at::Tensor gradient = values({6, 4}, 3);
  at::Tensor after = values({6, 4}, 4);

  void record(Sink& sink, int rank, bool whole) const {
    const int dp = whole ? 0 : rank / 3, tp = whole ? 0 : rank % 3;
    const auto cut = [&](const at::Tensor& t, int dp_dim, int tp_dim) {
      at::Tensor local = t;
      if (!whole && dp_dim >= 0)
        local = local.narrow(dp_dim, dp * t.size(dp_dim) / 2, t.size(dp_dim) / 2);
      if (!whole && tp_dim >= 0)
        local = local.narrow(tp_dim, tp * t.size(tp_dim) / 3, t.size(tp_dim) / 3);
      return local;
    };
    sink.on_record(
        site(RecordKind::kDataId, "sample_ids", layout_of({4, 2}, {shard(Axis::kDp, 0)})),
        cut(ids, 0, -1));
    sink.on_record(site(RecordKind::kParam, "w", layout_of({6, 4}, {shard(Axis::kTp, 0)})),
                   cut(weight, -1, 0));
    (void)sink.on_activation(site(RecordKind::kActivation, "x",
                                  layout_of({4, 6}, {shard(Axis::kDp, 0), shard(Axis::kTp, 1)})),
                             cut(activation, 0, 1));
    (void)sink.on_activation_grad(site(RecordKind::kActivationGrad, "x",
                                       layout_of({4, 6}, {shard(Axis::kDp, 0)}), whole ? 1 : 2),
                                  whole ? activation : cut(activation, 0, -1) * 2);
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({6, 4}, {shard(Axis::kTp, 0)})),
                   cut(gradient, -1, 0));
    sink.on_record(site(RecordKind::kParam, "w", layout_of({6, 4}, {shard(Axis::kTp, 0)})),
                   cut(after, -1, 0));
  }
};

Body whole(Step step) {
  return [step](Sink& sink, int rank) { step.record(sink, rank, true); };
}

/// One-ulp-like movements: 1e-6 relative, another pattern in each run.
Reference step_reference() {
  return reference(whole(Step{}), [](int i) {
    Step moved;
    for (at::Tensor* t : {&moved.activation, &moved.gradient, &moved.after})
      *t = *t * (1 + 1e-6 * values(t->sizes().vec(), 50 + i));
    return whole(moved);
  });
}

/// What `change` makes of a rank's own copy of the step.
Trace step_trace(
    const Reference& reference,
    const std::function<void(Step&, int rank)>& change = [](Step&, int) {}) {
  return run(kDp2Tp3, &reference, [&](Sink& sink, int rank) {
    Step step;
    change(step, rank);
    step.record(sink, rank, false);
  });
}

JudgePolicy options() {
  JudgePolicy o;
  o.activation_grad_scale = 2;
  return o;
}

TEST(Judge, AShardedRunOfTheSameValuesConforms) {
  const Reference reference = step_reference();

  const Verdict verdict = judge(reference, step_trace(reference), options());

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_EQ(verdict.compared, 6);
  EXPECT_TRUE(verdict.findings.empty());
  EXPECT_TRUE(verdict.missing.empty());
  EXPECT_TRUE(verdict.extra.empty());
  for (const TensorComparison& t : verdict.tensors) EXPECT_TRUE(t.sharded);
}

TEST(Judge, AMovementWithinTheResponseConformsAndOneBeyondItDiverges) {
  const Reference reference = step_reference();
  const auto off = [&](double error) {
    return judge(reference,
                 step_trace(reference,
                            [&](Step& step, int) {
                              step.gradient = step.gradient * (1 + error * values({6, 4}, 99));
                            }),
                 options());
  };

  EXPECT_EQ(off(1e-6).status, Status::kConforms);
  const Verdict verdict = off(1e-4);
  ASSERT_EQ(verdict.status, Status::kDiverges);
  ASSERT_EQ(verdict.findings.size(), 1U);
  EXPECT_EQ(verdict.findings[0].stage, Stage::kParameterGrad);
  EXPECT_TRUE(verdict.findings[0].confirmed);
  EXPECT_THAT(verdict.findings[0],
              FindingIs(FindingId::kDiffers, {{"rank", 0}, {"index", std::vector{0, 0}}}));
}

// What a rank adds to a tensor that is judged itself needs no counterpart; a summand of an unknown
// tensor does.
TEST(Judge, SummandsOfAJudgedTensorAreNotExtra) {
  const Reference reference = step_reference();
  const auto with = [&](const char* name) {
    return judge(
        reference,
        run(kDp2Tp3, &reference,
            [&](Sink& sink, int rank) {
              Step{}.record(sink, rank, false);
              const Layout layout = layout_of({4, 6}, {shard(Axis::kDp, 0), partial(Axis::kTp)});
              (void)sink.on_activation(site(RecordKind::kActivation, name, layout),
                                       values({2, 6}, 7));
            }),
        options());
  };

  EXPECT_EQ(with("x.partial").status, Status::kConforms);
  EXPECT_EQ(with("y.partial").status, Status::kDiverges);
  EXPECT_EQ(with("x.part").status, Status::kDiverges);
}

// A NaN equals a NaN, and everything behind it is NaN, too: such a run proves nothing, whatever
// else is right.
TEST(Judge, AReferenceThatIsNotFiniteIsVacuousAndNamesTheFirstSuchTensor) {
  Step broken;
  broken.activation[1][2] = NAN;
  const Reference reference =
      synthetic::reference(whole(broken), [&](int) { return whole(broken); });
  const auto judged = [&](double error) {
    return judge(reference,
                 run(kDp2Tp3, &reference,
                     [&](Sink& sink, int rank) {
                       Step step = broken;
                       step.gradient = step.gradient * (1 + error);
                       step.record(sink, rank, false);
                     }),
                 options());
  };

  const Verdict verdict = judged(0);

  EXPECT_EQ(verdict.status, Status::kVacuous);
  EXPECT_THAT(verdict.rule,
              RuleIs(RuleId::kReferenceNotFinite, {{"tensor", "forward at x (step 0)"}}));
  EXPECT_FALSE(verdict.shows_too_little) << "no emulation makes up for it";
  EXPECT_EQ(judged(0.5).status, Status::kDiverges) << "what is wrong beside it is still said";
}

// An emulation follows whatever is declared: equality with it excuses comparisons that show too
// little, and nothing else.
TEST(VerdictThroughRecord, ExcusesWhatShowsTooLittleAndNeitherDivergenceNorOtherVacuousness) {
  Verdict emulation;
  const auto through = [&](Status status, bool shows_too_little) {
    emulation.status = status;
    emulation.shows_too_little = shows_too_little;
    emulation.weak = 1;
    return verdict_through_record(emulation, 7);
  };

  EXPECT_EQ(through(Status::kVacuous, true).status, Status::kConforms);
  EXPECT_EQ(through(Status::kVacuous, false).status, Status::kVacuous)
      << "the reference is not finite, or nothing was compared";
  EXPECT_EQ(through(Status::kDiverges, false).status, Status::kDiverges)
      << "a mistake that is declared is a mistake";
  EXPECT_EQ(through(Status::kIncomplete, false).status, Status::kIncomplete);
  EXPECT_EQ(through(Status::kConforms, false).equal_to_emulation, 7);
}

TEST(Judge, TheFirstFindingIsTheFirstInStageOrderWithItsFirstRank) {
  const Reference reference = step_reference();

  const Verdict verdict = judge(reference,
                                step_trace(reference,
                                           [](Step& step, int rank) {
                                             if (rank % 3 == 1) step.after = step.after + 1;
                                             if (rank >= 3) step.activation = step.activation * 1.5;
                                             if (rank % 3 == 2) step.gradient = values({6, 4}, 77);
                                           }),
                                options());

  ASSERT_GE(verdict.findings.size(), 4U);
  EXPECT_EQ(verdict.findings[0].stage, Stage::kForward);
  EXPECT_THAT(verdict.findings[0].ranks, ElementsAre(3, 4, 5));
  EXPECT_EQ(verdict.findings[1].stage, Stage::kActivationGrad);
  EXPECT_EQ(verdict.findings[2].stage, Stage::kParameterGrad);
  EXPECT_THAT(verdict.findings[2].ranks, ElementsAre(2, 5));
  EXPECT_EQ(verdict.findings[3].stage, Stage::kParameterAfterStep);
}

TEST(Judge, DataIdsAndWeightsAsReadMustBeEqual) {
  const Reference reference = step_reference();

  const Verdict ids = judge(reference,
                            step_trace(reference,
                                       [](Step& step, int rank) {
                                         if (rank == 4) step.ids = step.ids + 1;
                                       }),
                            options());
  const Verdict weights = judge(reference,
                                step_trace(reference,
                                           [](Step& step, int rank) {
                                             if (rank % 3 == 2)
                                               step.weight = step.weight * (1 + 1e-7);
                                           }),
                                options());

  EXPECT_EQ(ids.status, Status::kDiverges);
  EXPECT_EQ(ids.findings.at(0).stage, Stage::kDataIds);
  EXPECT_EQ(weights.status, Status::kDiverges);
  EXPECT_EQ(weights.findings.at(0).stage, Stage::kParametersRead);
}

TEST(Judge, StopsWhereDataDiffer) {
  const Reference reference = step_reference();

  const Verdict verdict = judge(reference,
                                step_trace(reference,
                                           [](Step& step, int) {
                                             step.ids = step.ids + 1;
                                             step.activation = step.activation * 2;
                                             step.gradient = step.gradient * 2;
                                           }),
                                options());
  const Verdict without_data = judge(reference,
                                     step_trace(reference,
                                                [](Step& step, int) {
                                                  step.activation = step.activation * 2;
                                                  step.gradient = step.gradient * 2;
                                                }),
                                     options());

  EXPECT_EQ(verdict.status, Status::kDiverges);
  ASSERT_EQ(verdict.findings.size(), 1U);
  EXPECT_EQ(verdict.findings[0].stage, Stage::kDataIds);
  for (const TensorComparison& tensor : verdict.tensors) EXPECT_EQ(tensor.stage, Stage::kDataIds);
  EXPECT_EQ(verdict.compared, 1);
  EXPECT_EQ(verdict.notes.size(), 1U);
  EXPECT_GE(without_data.findings.size(), 3U)
      << "what is wrong besides is listed, if data are right";
}

TEST(Judge, ReplicasThatPartWithinTheToleranceStillDiverge) {
  const Reference reference = step_reference();

  const Verdict verdict = judge(reference,
                                step_trace(reference,
                                           [](Step& step, int rank) {
                                             // dp coordinate 1, tp coordinate 1
                                             if (rank == 4) step.after = step.after * (1 + 2e-7);
                                           }),
                                options());

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.at(0).stage, Stage::kReplicaDrift);
  EXPECT_THAT(verdict.findings[0],
              FindingIs(FindingId::kCopiesDiffer, {{"axes", std::vector{"dp"}}}));
}

TEST(Judge, SignedZerosAreEqual) {
  const Body zeros = [](Sink& sink, int rank) {
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({2})),
                   rank == 1 ? at::tensor({-0.0F, 1.0F}) : at::tensor({0.0F, 1.0F}));
  };
  const Reference r = reference(zeros);
  JudgePolicy exact = with_unused_axes();
  exact.level = Level::kExact;

  EXPECT_EQ(judge(r, run(MeshShape({{Axis::kTp, 2}}), &r, zeros), exact).status, Status::kConforms);
}

TEST(Judge, ANanNeverConforms) {
  const Reference reference = step_reference();
  for (const float poison : {NAN, INFINITY}) {
    const Verdict verdict = judge(reference,
                                  step_trace(reference,
                                             [&](Step& step, int rank) {
                                               if (rank != 5) return;
                                               step.activation = step.activation.clone();
                                               step.activation[3][5] = poison;
                                             }),
                                  options());

    ASSERT_EQ(verdict.status, Status::kDiverges);
    EXPECT_THAT(verdict.findings.at(0).ranks, ElementsAre(5));
    EXPECT_THAT(verdict.findings[0], FindingIs(FindingId::kDiffers, {{"not_finite", 1}}));
  }
}

TEST(Judge, AMissingRankIsIncomplete) {
  const Reference reference = step_reference();
  Trace trace = step_trace(reference);
  trace.ranks.erase(trace.ranks.begin() + 2);

  const Verdict verdict = judge(reference, trace, options());

  EXPECT_EQ(verdict.status, Status::kIncomplete);
  EXPECT_THAT(verdict.rule, RuleIs(RuleId::kRanksMissing,
                                   {{"ranks", 5}, {"world_size", 6}, {"missing", std::vector{2}}}));
}

TEST(Judge, MissingAndExtraTensorsAreAllListedAndDiverge) {
  const Reference reference = step_reference();
  Trace trace = step_trace(reference);
  for (RankTrace& rank : trace.ranks) {
    rank.records[2].key.name = "y";
    rank.records[4].key.name = "v";
  }

  const Verdict verdict = judge(reference, trace, options());

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.missing, ElementsAre("forward at x (step 0)", "gradient of w (step 0)"));
  EXPECT_THAT(verdict.extra, ElementsAre("gradient of v (step 0)", "forward at y (step 0)"));
}

TEST(Judge, ATensorThatOneRankDidNotRecordDiverges) {
  const Reference reference = step_reference();
  Trace trace = step_trace(reference);
  trace.ranks[4].records.erase(trace.ranks[4].records.begin() + 4);

  const Verdict verdict = judge(reference, trace, options());

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0), FindingIs(FindingId::kMissingOnRanks));
  EXPECT_THAT(verdict.findings[0].ranks, ElementsAre(4));
}

TEST(Judge, PartsThatOverlapOrLeaveAGapDiverge) {
  const Body reference_body = [](Sink& sink, int) {
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({6})), values({6}, 1));
  };
  const Reference r = reference(reference_body);
  const auto with_size = [&](std::int64_t begin) {
    return run(MeshShape({{Axis::kTp, 2}}), &r, [&](Sink& sink, int rank) {
      Layout layout = layout_of({6});
      layout.explicit_parts = true;
      const std::int64_t from = rank == 0 ? 0 : begin;
      layout.boxes = {{{0}, {from}, {rank == 0 ? 3 : 6 - begin}}};
      sink.on_record(site(RecordKind::kGrad, "w", layout),
                     values({6}, 1).narrow(0, from, layout.boxes[0].size[0]));
    });
  };
  JudgePolicy exact;
  exact.level = Level::kExact;

  EXPECT_EQ(judge(r, with_size(3), exact).status, Status::kConforms);
  for (const std::int64_t begin : {2, 4})
    EXPECT_THAT(judge(r, with_size(begin), exact).findings.at(0),
                FindingIs(FindingId::kPartsDoNotTile));
}

TEST(Judge, PartialsAreAddedUpBeforeTheyAreCompared) {
  const at::Tensor whole_value = values({6}, 1, at::kDouble);
  const Reference r = reference([&](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivation, "p", layout_of({6})), whole_value);
  });
  const auto with_share = [&](double share) {
    return run(MeshShape({{Axis::kTp, 2}}), &r, [&](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kActivation, "p", layout_of({6}, {partial(Axis::kTp)})),
                     whole_value * (rank == 0 ? 0.25 : share));
    });
  };
  JudgePolicy rtol;
  rtol.rtol = 1e-12;

  EXPECT_EQ(judge(r, with_share(0.75), rtol).status, Status::kConforms);
  EXPECT_EQ(judge(r, with_share(0.5), rtol).status, Status::kDiverges);
}

TEST(Judge, PartialsOfScaledGradientsAreComparedUnscaled) {
  const at::Tensor whole_value = values({6}, 1, at::kDouble);
  const Reference r = reference([&](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivationGrad, "p", layout_of({6}), 8), whole_value * 8);
  });
  const auto with_share = [&](double share) {
    return run(MeshShape({{Axis::kTp, 2}}), &r, [&](Sink& sink, int rank) {
      sink.on_record(
          site(RecordKind::kActivationGrad, "p", layout_of({6}, {partial(Axis::kTp)}), 16),
          whole_value * 16 * (rank == 0 ? 0.25 : share));
    });
  };
  JudgePolicy rtol;
  rtol.rtol = 1e-12;

  EXPECT_EQ(judge(r, with_share(0.75), rtol).status, Status::kConforms);
  EXPECT_EQ(judge(r, with_share(0.5), rtol).status, Status::kDiverges);
}

TEST(Judge, AnotherDeclaredGradientScaleDiverges) {
  const Reference reference = step_reference();
  JudgePolicy demanded = options();
  demanded.activation_grad_scale = 1;

  const Verdict verdict = judge(reference, step_trace(reference), demanded);

  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.at(0), FindingIs(FindingId::kOtherGradientScale, {{"demanded", 1}}));
}

TEST(Judge, ComparingNothingIsVacuous) {
  const Body nan = [](Sink& sink, int) {
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({2})), at::full({2}, NAN));
  };
  const Reference all_nan = reference(nan, [&](int) { return nan; });
  const Reference no_responses = reference(whole(Step{}));

  EXPECT_THAT(judge(all_nan, run(MeshShape(), &all_nan, nan), {}).rule,
              RuleIs(RuleId::kReferenceNotFinite, {{"nans", 2}, {"elements", 2}}));
  EXPECT_THAT(judge(Reference(), run(MeshShape(), nullptr, nan), {}).rule,
              RuleIs(RuleId::kReferenceEmpty));
  const Verdict verdict = judge(no_responses, step_trace(no_responses), options());
  EXPECT_EQ(verdict.status, Status::kVacuous);
  EXPECT_THAT(verdict.rule, RuleIs(RuleId::kResponseMissing));
}

TEST(Judge, ATensorBelowItsOwnResponseIsJudgedByAbsoluteError) {
  const auto noise = [](double size, int seed) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kGrad, "b", layout_of({8})), values({8}, seed) * size);
      // beside which it is small, and of few elements
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({4, 4})), values({4, 4}, 2));
    });
  };
  const Reference r = reference(noise(1e-9, 1), [&](int i) { return noise(2e-9, 10 + i); });

  const Verdict inside = judge(r, run(MeshShape(), &r, noise(1e-9, 30)), {});
  const Verdict outside = judge(r, run(MeshShape(), &r, noise(1e-4, 30)), {});

  EXPECT_EQ(inside.status, Status::kConforms) << inside.reason;
  EXPECT_TRUE(inside.tensors.at(0).insensitive);
  EXPECT_EQ(inside.judged.insensitive, 1);
  EXPECT_EQ(outside.status, Status::kDiverges);
}

/// A gradient in fp16 that is clipped by 1 / 64, so that subnormal numbers are left. The reference
/// has the gradient alone; `moved` is what perturbed runs add to it.
Body clipping_step(bool is_reference, double moved, double factor_on_clipped = 1) {
  return [=](Sink& sink, int) {
    const at::Tensor gradient =
        ((values({6, 4}, 3, at::kDouble) + moved * values({6, 4}, 5, at::kDouble)) * 1e-4)
            .to(at::kHalf);
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({6, 4})), gradient);
    sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                   at::full({1}, 6.4, at::kDouble));
    if (is_reference) return;
    sink.on_record(site(RecordKind::kGrad, "w.clipped", layout_of({6, 4})),
                   (gradient.to(at::kDouble) * (factor_on_clipped / 64)).to(at::kHalf));
  };
}

TEST(Judge, ClippedGradientsAreJudgedInUnitsOfTheReferenceAndMayBeSubnormal) {
  JudgePolicy policy;
  policy.coarsest = Dtype::kFloat16;
  policy.max_grad_norm = 0.1;
  for (const double moved : {1e-3, 0.8}) {  // a gradient, and rounding noise
    const Reference reference = synthetic::reference(
        clipping_step(true, 0),
        [&](int i) { return clipping_step(true, i % 2 == 0 ? moved : -moved); }, 3, policy);
    const auto status_of = [&](double factor) {
      const Trace trace =
          run(MeshShape(), &reference, clipping_step(false, 0, factor), Keep::kWhatDiffers, policy);
      const Verdict verdict = judge(reference, trace, policy);
      EXPECT_TRUE(std::ranges::any_of(verdict.tensors, [](const TensorComparison& t) {
        return t.key.name == "w.clipped" && t.level == Level::kPerturbed;
      }));
      return verdict.status;
    };

    EXPECT_NE(status_of(1), Status::kDiverges) << moved;
    EXPECT_EQ(status_of(moved < 0.1 ? 1.2 : 9), Status::kDiverges) << moved;
  }
}

TEST(Judge, ARunWhoseGradientsAreNoiseShowsTooLittle) {
  const auto noise = [](int seed) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kActivation, "x", layout_of({8})), values({8}, 1));
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({8})), values({8}, seed) * 1e-9);
    });
  };
  const Reference r = reference(noise(1), [&](int i) { return noise(10 + i); });

  const Verdict verdict = judge(r, run(MeshShape(), &r, noise(30)), {});

  EXPECT_EQ(verdict.status, Status::kVacuous) << verdict.reason;
  EXPECT_TRUE(verdict.shows_too_little);
  EXPECT_EQ(verdict.judged.insensitive_gradients, 1);
}

TEST(Judge, EveryComparisonReportsTheScaleItWouldReject) {
  const Reference reference = step_reference();
  const Verdict verdict = judge(reference, step_trace(reference), options());
  const TensorComparison& gradient = verdict.tensors.at(4);
  ASSERT_GT(gradient.scale_sensitivity, 0);

  const auto scaled = [&](double factor) {
    return judge(reference,
                 step_trace(reference,
                            [&](Step& step, int) {
                              step.gradient =
                                  (step.gradient.to(at::kDouble) * factor).to(at::kFloat);
                            }),
                 options());
  };

  EXPECT_EQ(scaled(1 + 1.5 * gradient.scale_sensitivity).status, Status::kDiverges);
  EXPECT_EQ(scaled(1 + 0.5 * gradient.scale_sensitivity).status, Status::kConforms);
}

}  // namespace
}  // namespace isoshard
