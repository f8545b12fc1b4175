// SPDX-License-Identifier: Apache-2.0
/// Ranks that hold one record in different dtypes are a finding; legal runs whose dtypes differ
/// elsewhere are none, and a dtype that is not the reference's is noted.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "harness/ids/phrase.h"
#include "harness/judge/judge.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

/// Numbers that every floating dtype and int8 hold, so that dtypes alone can differ.
at::Tensor small_numbers(const Shape& shape) {
  return at::arange(1, numel_of(shape) + 1, at::kFloat).reshape(shape);
}

/// Two tensors of a kind whose samples dp ranks share out, in the dtypes that `dtype_on` gives the
/// ranks; the reference is rank 0.
using DtypeOn = std::function<at::ScalarType(int rank)>;
Body two_records(RecordKind kind, const DtypeOn& dtype_on, bool whole) {
  return [=](Sink& sink, int rank) {
    for (const char* const name : {"a", "b"}) {
      const at::Tensor value = small_numbers({4, 3}).to(dtype_on(rank));
      sink.on_record(site(kind, name,
                          layout_of({4, 3}, whole ? std::vector<Placement>{}
                                                  : std::vector<Placement>{shard(Axis::kDp, 0)})),
                     whole ? value : value.narrow(0, rank / 3 * 2, 2));
    }
  };
}

JudgePolicy tolerant() {
  JudgePolicy policy = with_unused_axes();
  policy.rtol = 1e-2;
  return policy;
}

Verdict verdict_of(const Reference& reference, const Body& body,
                   const JudgePolicy& policy = tolerant()) {
  return judge(reference, run(kDp2Tp3, &reference, body), policy);
}

DtypeOn always(at::ScalarType dtype) {
  return [dtype](int) { return dtype; };
}

/// The cause of ranks that have `odd` where the others have the usual dtype.
testing::Matcher<const Cause&> mixed_dtypes(std::vector<int> ranks, std::string_view odd,
                                            std::string_view usual) {
  return IsCause(CauseId::kMixedDtypes,
                 {{"ranks", ranks}, {"others", std::vector{odd}}, {"usual", usual}});
}

/// As where autocast is off on the second half of the ranks.
at::ScalarType half_of_the_ranks(int rank) {
  return rank < 3 ? at::kBFloat16 : at::kFloat;
}

TEST(RecordDtypes, ThatDifferBetweenRanksDivergeAlthoughAllNumbersAreEqual) {
  const Reference right =
      reference(two_records(RecordKind::kActivation, always(at::kBFloat16), true));

  const Verdict verdict =
      verdict_of(right, two_records(RecordKind::kActivation, half_of_the_ranks, false));

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  ASSERT_EQ(verdict.findings.size(), 2U);
  const Finding& first = verdict.findings[0];
  EXPECT_EQ(first.key.name, "a");
  EXPECT_THAT(first.ranks, ElementsAre(3, 4, 5)) << "that do not have the reference's";
  EXPECT_TRUE(first.confirmed);
  EXPECT_THAT(first.cause, mixed_dtypes({3, 4, 5}, "fp32", "bf16"));
  EXPECT_THAT(first.diagnosis, HasSubstr(phrase(PhraseId::kAutocast)));
  EXPECT_EQ(verdict.tensors.at(0).stats.unequal_values, 0) << "values are compared all the same";
  EXPECT_FALSE(verdict.tensors.at(0).within);
  EXPECT_THAT(verdict.notes, ElementsAre(HasSubstr("2 of 2 tensors have another dtype")));
}

TEST(RecordDtypes, ThatDifferAreFoundInEveryKindOfRecord) {
  for (const RecordKind kind :
       {RecordKind::kParam, RecordKind::kGrad, RecordKind::kOptimizer, RecordKind::kDataId,
        RecordKind::kMask, RecordKind::kActivation, RecordKind::kActivationGrad}) {
    for (const auto& [usual, odd] : {std::pair(at::kFloat, at::kBFloat16),
                                     {at::kHalf, at::kBFloat16},
                                     {at::kLong, at::kInt}}) {
      const DtypeOn one_rank = [usual = usual, odd = odd](int rank) {
        return rank == 4 ? odd : usual;
      };
      const Reference right = reference(two_records(kind, always(usual), true));

      const Verdict verdict = verdict_of(right, two_records(kind, one_rank, false)),
                    clean = verdict_of(right, two_records(kind, always(usual), false));

      const std::string what = std::string(name_of(kind)) + " " + at::toString(odd);
      ASSERT_EQ(verdict.status, Status::kDiverges) << what;
      EXPECT_THAT(verdict.findings[0].ranks, ElementsAre(4)) << what;
      EXPECT_THAT(verdict.findings[0].cause, IsCause(CauseId::kMixedDtypes)) << what;
      EXPECT_EQ(clean.status, Status::kConforms) << what << clean.reason;
      EXPECT_THAT(clean.notes, IsEmpty()) << what;
    }
  }
}

// Without a rank that has the reference's dtype, most ranks say what is usual.
TEST(RecordDtypes, OfMostRanksAreTheUsualOnes) {
  const Reference right = reference(two_records(RecordKind::kGrad, always(at::kDouble), true));

  const Verdict verdict = verdict_of(
      right, two_records(
                 RecordKind::kGrad, [](int rank) { return rank == 0 ? at::kFloat : at::kBFloat16; },
                 false));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings[0].ranks, ElementsAre(0));
}

/// What dp ranks add up, each with half of it.
Body summands(const DtypeOn& dtype_on, bool whole) {
  return [=](Sink& sink, int rank) {
    const at::Tensor value = (small_numbers({2, 4}) * (whole ? 2 : 1)).to(dtype_on(rank));
    sink.on_record(site(RecordKind::kActivation, "m",
                        layout_of({2, 4}, whole ? std::vector<Placement>{}
                                                : std::vector<Placement>{partial(Axis::kDp)})),
                   value);
  };
}

TEST(RecordDtypes, OfSummandsThatDifferAreOneFinding) {
  const Reference right = reference(summands(always(at::kFloat), true));

  const Verdict verdict = verdict_of(right, summands(half_of_the_ranks, false)),
                clean = verdict_of(right, summands(always(at::kFloat), false));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  ASSERT_EQ(verdict.findings.size(), 1U) << "that they cannot be added says no more";
  EXPECT_THAT(verdict.findings[0].cause, mixed_dtypes({0, 1, 2}, "bf16", "fp32"));
  EXPECT_EQ(clean.status, Status::kConforms) << clean.reason;
}

// Copies have other bytes in another dtype: that is no drift of replicas.
TEST(RecordDtypes, OfCopiesThatDifferAreOneFinding) {
  const auto copies = [](const DtypeOn& dtype_on) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kParam, "w", layout_of({3})),
                     small_numbers({3}).to(dtype_on(rank)));
    });
  };
  const Reference right = reference(copies(always(at::kFloat)));

  const Verdict verdict = verdict_of(right, copies(half_of_the_ranks));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  ASSERT_EQ(verdict.findings.size(), 1U);
  EXPECT_THAT(verdict.findings[0].cause, mixed_dtypes({0, 1, 2}, "bf16", "fp32"));
  EXPECT_THAT(verdict.findings[0].diagnosis, HasSubstr(phrase(PhraseId::kModelCast)));
}

TEST(RecordDtypes, DoNotHideThatValuesAreWrongToo) {
  const Reference right = reference(two_records(RecordKind::kGrad, always(at::kBFloat16), true));

  const Verdict verdict = verdict_of(right, [](Sink& sink, int rank) {
    two_records(RecordKind::kGrad, half_of_the_ranks, false)(sink, rank);
    sink.on_record(site(RecordKind::kGrad, "c", layout_of({2})), at::ones({2}));
  });
  const Verdict scaled = verdict_of(right, [](Sink& sink, int rank) {
    for (const char* const name : {"a", "b"})
      sink.on_record(
          site(RecordKind::kGrad, name, layout_of({4, 3}, {shard(Axis::kDp, 0)})),
          (small_numbers({4, 3}) * 2).narrow(0, rank / 3 * 2, 2).to(half_of_the_ranks(rank)));
  });

  EXPECT_THAT(verdict.extra, ElementsAre(HasSubstr("gradient of c")));
  ASSERT_EQ(scaled.status, Status::kDiverges);
  EXPECT_EQ(scaled.findings.size(), 4U) << "dtype and values of both";
}

// In a skipped step gradients may be infinite, but not in two dtypes.
TEST(RecordDtypes, OfGradientsThatOverflowAreHeldToTheSame) {
  const auto step = [](const DtypeOn& dtype_on) {
    return Body([=](Sink& sink, int rank) {
      const auto scalar = [&](const char* name, double value) {
        sink.on_record(site(RecordKind::kScalar, name, layout_of({1})),
                       at::tensor({value}, at::kDouble));
      };
      scalar("loss", 2);
      at::Tensor gradient = small_numbers({4});
      gradient[1] = std::numeric_limits<float>::infinity();
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({4})), gradient.to(dtype_on(rank)));
      scalar("found_inf", 1);
    });
  };
  const Reference right = reference(step(always(at::kFloat)));

  const Verdict verdict = verdict_of(right, step(half_of_the_ranks)),
                clean = verdict_of(right, step(always(at::kFloat)));

  EXPECT_EQ(clean.status, Status::kConforms) << clean.reason;
  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings[0], FindingIs(FindingId::kDtypesOfRanksDiffer));
}

TEST(RecordDtypes, ThatAreNotTheReferencesOnAnyRankAreNoted) {
  const Reference right = reference(two_records(RecordKind::kGrad, always(at::kBFloat16), true));

  const Verdict verdict =
      verdict_of(right, two_records(RecordKind::kGrad, always(at::kFloat), false));

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(
      verdict.notes,
      ElementsAre(AllOf(HasSubstr("2 of 2 tensors have another dtype than in the reference"),
                        HasSubstr("gradient of a"), HasSubstr("fp32 on rank 0, bf16 in"))));
}

// Masters in fp32 beside 16-bit weights, and stages of a pipeline that compute in other dtypes.
TEST(RecordDtypes, MayDifferBetweenRecords) {
  const auto body = [](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const auto put = [&](RecordKind kind, const char* name, at::ScalarType dtype, int stage) {
        if (!whole && rank / 3 != stage) return;
        sink.on_record(
            site(kind, name,
                 layout_of({3}, whole ? std::vector<Placement>{}
                                      : std::vector<Placement>{only_at(Axis::kDp, stage)})),
            small_numbers({3}).to(dtype));
      };
      put(RecordKind::kParam, "1.w", at::kBFloat16, 0);
      put(RecordKind::kParam, "2.w", at::kFloat, 1);
      put(RecordKind::kOptimizer, "1.w.master", at::kFloat, 0);
    });
  };
  const Reference right = reference(body(true));

  const Verdict verdict = verdict_of(right, body(false));

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_EQ(verdict.compared, 3);
  EXPECT_THAT(verdict.notes, IsEmpty());
}

/// Optimizer state that rank 4 owns as a whole; the others hold empty shards of another dtype.
Body owned_by_one(bool whole) {
  return [=](Sink& sink, int rank) {
    Layout layout = layout_of({6});
    const bool is_owner = rank == 4;
    if (!whole) {
      layout.explicit_parts = true;
      if (is_owner) layout.flat = {{0, 0, 6}};
    }
    sink.on_record(
        site(RecordKind::kOptimizer, "w.exp_avg", layout),
        whole || is_owner ? small_numbers({6}).to(at::kBFloat16) : at::empty({0}, at::kFloat));
  };
}

TEST(RecordDtypes, OfEmptyShardsAreTheirOwn) {
  const Reference right = reference(owned_by_one(true));
  const Trace trace = run(kDp2Tp3, &right, owned_by_one(false), Keep::kEverything);

  const Verdict verdict = judge(right, trace, tolerant());
  const HostTensor whole = trace.assemble({0, RecordKind::kOptimizer, "w.exp_avg", 0});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(verdict.notes, IsEmpty());
  EXPECT_EQ(whole.dtype, Dtype::kBFloat16) << "of the rank that holds it";
}

TEST(RecordDtypes, OfTheFirstFindingAreTheCauseInTheVerdictsReason) {
  const Reference right = reference(two_records(RecordKind::kParam, always(at::kFloat), true));

  const Verdict verdict = verdict_of(
      right, two_records(
                 RecordKind::kParam,
                 [](int rank) { return rank == 1 ? at::kBFloat16 : at::kFloat; }, false));

  EXPECT_THAT(verdict.reason, AllOf(HasSubstr(" on rank 1; "), HasSubstr("bf16 on rank 1, fp32 on "
                                                                         "ranks 0, 2 to 5")));
  EXPECT_THAT(verdict.reason, Not(HasSubstr("autocast"))) << "weights are not cast by it";
}

}  // namespace
}  // namespace isoshard
