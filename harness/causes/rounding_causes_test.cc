// SPDX-License-Identifier: Apache-2.0
/// Causes that are roundings, and beside each a run that looks like it and is not.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;

TEST(ClassCauses, ValuesRoundedOnTheWayAreTold) {
  const at::Tensor value = values({16, 8}, 1);
  const auto rounded = [](const at::Tensor& t, at::ScalarType to) {
    return t.to(to).to(t.scalar_type());
  };
  const auto of = [&](const RankChange& change) {
    return cause_of_one(RecordKind::kActivation, value, change);
  };

  EXPECT_THAT(of([&](at::Tensor v, int, int) { return rounded(v, at::kBFloat16); }),
              IsCause(CauseId::kRounded, {{"dtype", "bf16"}}));
  EXPECT_THAT(
      of([&](at::Tensor v, int, int tp) { return tp == 1 ? rounded(v, at::kHalf) : v; }),
      IsCause(CauseId::kRounded, {{"dtype", "fp16 or TF32"}, {"ranks", std::vector{1, 4}}}));
  EXPECT_THAT(of([&](at::Tensor v, int, int) {
                v.narrow(0, 0, 15).copy_(rounded(v.narrow(0, 0, 15), at::kBFloat16));
                return v;
              }),
              IsCause(CauseId::kPartRounded, {{"first", 0}, {"last", 14}, {"dtype", "bf16"}}))
      << "some elements only";
  EXPECT_THAT(of([&](at::Tensor v, int, int) { return rounded(v * 1.02, at::kBFloat16); }),
              IsNoCause())
      << "off by more than half a step";
  EXPECT_THAT(cause_of_one(RecordKind::kActivation, rounded(value, at::kBFloat16),
                           [](at::Tensor v, int, int) {
                             return (v * (1 + 0x1p-8)).to(at::kBFloat16).to(at::kFloat);
                           }),
              IsNoCause())
      << "the right ones have few bits, too";
}

/// Sums of two micro-batches of bf16 gradients, which dp ranks hold for their own samples in fp32;
/// `change` is put on what each rank holds after the second one.
Cause own_sums_are(const std::function<at::Tensor(at::Tensor own)>& change) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const auto gradient = [](int dp, int micro_batch) {
        return values({8, 12}, 4 * dp + micro_batch + 1).to(at::kBFloat16).to(at::kFloat);
      };
      at::Tensor sum = at::zeros({8, 12});
      for (int m = 0; m < 2; ++m) {
        for (int dp = 0; dp < kMesh.degree(Axis::kDp); ++dp)
          if (whole || rank / kTp == dp) sum = sum + gradient(dp, m);
        const Layout layout = whole ? layout_of({8, 12}) : layout_of({8, 12}, {partial(Axis::kDp)});
        sink.on_record(site(RecordKind::kGrad, "m.w.micro_batch", layout),
                       whole || m == 0 ? sum : change(sum));
      }
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, GradientsOfMicroBatchesRoundedBeforeTheirSumAreTold) {
  const auto told = [](at::ScalarType to, double factor) {
    const auto body = [&](bool whole) {
      return Body([=](Sink& sink, int) {
        at::Tensor sum = at::zeros({32, 16});
        for (int m = 0; m < 3; ++m) {
          // a pass of which nothing else is recorded
          sink.on_record(site(RecordKind::kActivation, "m", layout_of({2})), values({2}, 1));
          const at::Tensor own = values({32, 16}, m + 1);
          sum = sum + (whole ? own : factor * own.to(to).to(at::kFloat));
        }
        sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({32, 16})), sum);
      });
    };
    return cause_of(body(true), body(false));
  };

  EXPECT_THAT(
      told(at::kBFloat16, 1),
      IsCause(CauseId::kSummandsRounded,
              {{"dtype", "bf16"}, {"over", std::vector<std::string>{"dp", "micro-batches"}}}));
  EXPECT_THAT(told(at::kFloat, 1.003), IsCause(CauseId::kScale, {{"scale", 1.003}}));
}

TEST(ClassCauses, SumsOfMicroBatchesThatAreRoundedAreTold) {
  EXPECT_THAT(
      own_sums_are([](const at::Tensor& own) { return own.to(at::kBFloat16).to(at::kFloat); }),
      IsCause(CauseId::kMicroBatchSumsRounded,
              {{"dtype", "bf16"}, {"values", 576}, {"micro_batch", 1}, {"bits", 8}}));
  EXPECT_THAT(own_sums_are([](const at::Tensor& own) { return own * 1.001; }),
              IsCause(CauseId::kScale, {{"scale", 1.001}}));
  EXPECT_THAT(own_sums_are(
                  [](const at::Tensor& own) { return 0.5 * own.to(at::kBFloat16).to(at::kFloat); }),
              IsNoCause())
      << "few bits, as one of two gradients has, but far from the right sum";
  EXPECT_THAT(own_sums_are([](const at::Tensor& own) {
                at::Tensor all_but_one = own.to(at::kBFloat16).to(at::kFloat);
                set_first(all_but_one, 0.123456);
                return all_but_one;
              }),
              IsNoCause());
}

/// Sums of three micro-batches, each dp rank's of its own samples in fp32 and their mean at the
/// end; `change` is put on a sum before the next micro-batch is added.
Cause sums_between_are(const std::function<at::Tensor(at::Tensor own)>& change) {
  constexpr int kMicroBatches = 3;
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int ranks = kMesh.degree(Axis::kDp);
      std::vector<at::Tensor> sums(static_cast<std::size_t>(ranks), at::zeros({8, 12}));
      const auto mean = [&] {
        at::Tensor all = at::zeros({8, 12});
        for (const at::Tensor& sum : sums) all = all + sum / ranks;
        return all;
      };
      for (int m = 0; m < kMicroBatches; ++m) {
        sink.on_record(site(RecordKind::kActivation, "m", layout_of({2})), values({2}, 1));
        for (int dp = 0; dp < ranks; ++dp) {
          at::Tensor& sum = sums[static_cast<std::size_t>(dp)];
          if (!whole && m > 0) sum = change(sum);
          sum = sum + values({8, 12}, 4 * dp + m + 1);
        }
        if (m + 1 == kMicroBatches) break;
        const Layout layout =
            whole ? layout_of({8, 12}) : layout_of({8, 12}, {partial(Axis::kDp, Reduction::kAvg)});
        sink.on_record(site(RecordKind::kGrad, "m.w.micro_batch", layout),
                       whole ? mean() : sums[static_cast<std::size_t>(rank / kTp)]);
      }
      sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({8, 12})), mean());
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, SumsOfMicroBatchesThatAreRoundedInBetweenAreTold) {
  const auto bf16 = [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kFloat); };

  EXPECT_THAT(sums_between_are(bf16),
              IsCause(CauseId::kSumRoundedBetween, {{"dtype", "bf16"}, {"sums", 2}}));
  EXPECT_THAT(sums_between_are([](const at::Tensor& own) {
                return own + 2e-3 * own * values({8, 12}, 77);
              }),
              IsNoCause())
      << "noise of that size";
  EXPECT_THAT(sums_between_are([&](const at::Tensor& own) {
                at::Tensor all_but_one = bf16(own);
                set_first(all_but_one, 0.123456);
                return all_but_one;
              }),
              IsNoCause())
      << "one element is off in another way";
}

TEST(ClassCauses, SummandsRoundedBeforeTheirMeanAreTold) {
  const at::Tensor first = values({32, 8}, 1), second = values({32, 8}, 2),
                   mean = (first + second) / 2;
  const auto bf16 = [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kFloat); };

  EXPECT_THAT(cause_of_one(RecordKind::kGrad, mean,
                           [&](at::Tensor, int, int) { return (bf16(first) + bf16(second)) / 2; }),
              IsCause(CauseId::kSummandsRounded,
                      {{"dtype", "bf16"}, {"over", std::vector<std::string>{"dp"}}}));
  EXPECT_THAT(cause_of_one(RecordKind::kGrad, mean,
                           [&](at::Tensor m, int, int) {
                             return m + 2e-3 * values({32, 8}, 9);
                           }),
              IsNoCause())
      << "noise of that size with all its bits";
}

/// A mean of sums [16, 12] over three dp ranks, as `mean` makes it.
Cause mean_of_three_is(const std::function<at::Tensor(at::Tensor sum)>& mean) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor sum = values({16, 12}, 1);
      sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({16, 12})),
                     whole ? sum / 3 : mean(sum));
    });
  };
  const Reference right = synthetic::reference(body(true));
  JudgePolicy policy;
  policy.level = Level::kExact;
  const Verdict verdict =
      judge(right, synthetic::run(MeshShape({{Axis::kDp, 3}}), &right, body(false)), policy);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.at(0).cause;
}

TEST(ClassCauses, AReciprocalInPlaceOfADivisionIsTold) {
  const at::Tensor third = at::full({}, 1.0F / 3.0F, at::kFloat);

  EXPECT_THAT(mean_of_three_is([&](const at::Tensor& sum) { return sum * third; }),
              IsCause(CauseId::kMultipliedWithReciprocal,
                      {{"degree", 3}, {"axis", "dp"}, {"values", 192}}));
  EXPECT_THAT(mean_of_three_is([&](const at::Tensor& sum) {
                const at::Tensor up = (values({16, 12}, 5) > 0).to(at::kFloat);
                return sum / 3 * (1 + 1.2e-7F * up);
              }),
              IsNoCause())
      << "last bits that no sum gives";
  EXPECT_THAT(mean_of_three_is([&](const at::Tensor& sum) {
                at::Tensor all_but_one = sum * third;
                set_first(all_but_one, 0.3);
                return all_but_one;
              }),
              IsCause(CauseId::kOneElementWrong));
}

/// A bf16 parameter after a step and its master; `made` says what the run has of the master.
Cause made_of_master(const std::function<at::Tensor(at::Tensor master)>& made) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor before = values({16, 8}, 1).to(at::kBFloat16),
                       master = before.to(at::kFloat) - 0.1 * values({16, 8}, 2);
      const Layout layout = layout_of({16, 8});
      sink.on_record(site(RecordKind::kParam, "m.w", layout), before);
      sink.on_record(site(RecordKind::kOptimizer, "m.w.master", layout), master);
      sink.on_record(site(RecordKind::kParam, "m.w", layout),
                     whole ? master.to(at::kBFloat16) : made(master));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, MastersThatAreCutOffAreTold) {
  const auto cut_off = [](const at::Tensor& master) {
    return master.view(at::kInt).bitwise_and(-65536).view(at::kFloat).to(at::kBFloat16);
  };

  EXPECT_THAT(made_of_master(cut_off), IsCause(CauseId::kMastersCutOff, {{"dtype", "bf16"}}));
  EXPECT_THAT(made_of_master([&](const at::Tensor& master) {
                at::Tensor all_but_one = cut_off(master);
                set_first(all_but_one, 3);
                return all_but_one;
              }),
              IsNoCause());
  EXPECT_THAT(made_of_master([&](const at::Tensor& master) { return cut_off(-master) * -1.5; }),
              IsNoCause());
}

}  // namespace
}  // namespace isoshard
