// SPDX-License-Identifier: Apache-2.0
/// Causes that are roundings, and beside each a run that looks like it and is not.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "harness/testing/diagnosed_run.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(ClassCauses, ValuesRoundedOnTheWayAreTold) {
  const at::Tensor value = values({16, 8}, 1);
  const auto rounded = [](const at::Tensor& t, at::ScalarType to) {
    return t.to(to).to(t.scalar_type());
  };
  const auto of = [&](const RankChange& change) {
    return diagnosis_of_one(RecordKind::kActivation, value, change);
  };

  EXPECT_THAT(of([&](at::Tensor v, int, int) { return rounded(v, at::kBFloat16); }),
              HasSubstr("rounded to bf16"));
  EXPECT_THAT(of([&](at::Tensor v, int, int tp) { return tp == 1 ? rounded(v, at::kHalf) : v; }),
              AllOf(HasSubstr("rounded to fp16 or TF32"), HasSubstr("on tp rank 1")));
  EXPECT_THAT(of([&](at::Tensor v, int, int) {
                v.narrow(0, 0, 15).copy_(rounded(v.narrow(0, 0, 15), at::kBFloat16));
                return v;
              }),
              Not(HasSubstr("rounded")))
      << "some elements only";
  EXPECT_THAT(of([&](at::Tensor v, int, int) { return rounded(v * 1.02, at::kBFloat16); }),
              Not(HasSubstr("rounded")))
      << "off by more than half a step";
  EXPECT_THAT(diagnosis_of_one(RecordKind::kActivation, rounded(value, at::kBFloat16),
                               [](at::Tensor v, int, int) {
                                 return (v * (1 + 0x1p-8)).to(at::kBFloat16).to(at::kFloat);
                               }),
              Not(HasSubstr("rounded")))
      << "the right ones have few bits, too";
}

/// Sums of two micro-batches of bf16 gradients, which dp ranks hold for their own samples in fp32;
/// `change` is put on what each rank holds after the second one.
std::string own_sums_are(const std::function<at::Tensor(at::Tensor own)>& change) {
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
  return diagnosis_of(body(true), body(false));
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
    return diagnosis_of(body(true), body(false));
  };

  EXPECT_THAT(told(at::kBFloat16, 1),
              HasSubstr("summands rounded to bf16 before they are added over dp or micro-batches"));
  EXPECT_THAT(told(at::kFloat, 1.003), Not(HasSubstr("rounded")));
}

TEST(ClassCauses, SumsOfMicroBatchesThatAreRoundedAreTold) {
  EXPECT_THAT(
      own_sums_are([](const at::Tensor& own) { return own.to(at::kBFloat16).to(at::kFloat); }),
      HasSubstr("rounded to bf16: all 576 values that ranks hold after micro-batch 1 have "
                "at most 8 significant bits"));
  EXPECT_THAT(own_sums_are([](const at::Tensor& own) { return own * 1.001; }),
              Not(HasSubstr("rounded")));
  EXPECT_THAT(own_sums_are(
                  [](const at::Tensor& own) { return 0.5 * own.to(at::kBFloat16).to(at::kFloat); }),
              Not(HasSubstr("rounded")))
      << "few bits, as one of two gradients has, but far from the right sum";
  EXPECT_THAT(own_sums_are([](const at::Tensor& own) {
                at::Tensor all_but_one = own.to(at::kBFloat16).to(at::kFloat);
                set_first(all_but_one, 0.123456);
                return all_but_one;
              }),
              Not(HasSubstr("rounded")));
}

/// Sums of three micro-batches, each dp rank's of its own samples in fp32 and their mean at the
/// end; `change` is put on a sum before the next micro-batch is added.
std::string sums_between_are(const std::function<at::Tensor(at::Tensor own)>& change) {
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
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, SumsOfMicroBatchesThatAreRoundedInBetweenAreTold) {
  const auto bf16 = [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kFloat); };

  EXPECT_THAT(sums_between_are(bf16),
              HasSubstr("the sum of micro-batches is rounded to bf16 before the next one is added: "
                        "it is off by what that takes from the sums after micro-batches 0..1"));
  EXPECT_THAT(sums_between_are([](const at::Tensor& own) {
                return own + 2e-3 * own * values({8, 12}, 77);
              }),
              Not(HasSubstr("rounded")))
      << "noise of that size";
  EXPECT_THAT(sums_between_are([&](const at::Tensor& own) {
                at::Tensor all_but_one = bf16(own);
                set_first(all_but_one, 0.123456);
                return all_but_one;
              }),
              Not(HasSubstr("rounded")))
      << "one element is off in another way";
}

TEST(ClassCauses, SummandsRoundedBeforeTheirMeanAreTold) {
  const at::Tensor first = values({32, 8}, 1), second = values({32, 8}, 2),
                   mean = (first + second) / 2;
  const auto bf16 = [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kFloat); };

  EXPECT_THAT(
      diagnosis_of_one(RecordKind::kGrad, mean,
                       [&](at::Tensor, int, int) { return (bf16(first) + bf16(second)) / 2; }),
      HasSubstr("summands rounded to bf16 before they are added over dp"));
  EXPECT_THAT(diagnosis_of_one(RecordKind::kGrad, mean,
                               [&](at::Tensor m, int, int) {
                                 return m + 2e-3 * values({32, 8}, 9);
                               }),
              Not(HasSubstr("rounded")))
      << "noise of that size with all its bits";
}

/// A mean of sums [16, 12] over three dp ranks, as `mean` makes it.
std::string mean_of_three_is(const std::function<at::Tensor(at::Tensor sum)>& mean) {
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
  return verdict.findings.empty() ? "no finding" : verdict.findings[0].diagnosis;
}

TEST(ClassCauses, AReciprocalInPlaceOfADivisionIsTold) {
  const at::Tensor third = at::full({}, 1.0F / 3.0F, at::kFloat);
  const std::string words =
      "multiplied with the rounded reciprocal in place of divided by 3 = dp: each of 192 values";

  EXPECT_THAT(mean_of_three_is([&](const at::Tensor& sum) { return sum * third; }),
              HasSubstr(words));
  EXPECT_THAT(mean_of_three_is([&](const at::Tensor& sum) {
                const at::Tensor up = (values({16, 12}, 5) > 0).to(at::kFloat);
                return sum / 3 * (1 + 1.2e-7F * up);
              }),
              Not(HasSubstr("reciprocal")))
      << "last bits that no sum gives";
  EXPECT_THAT(mean_of_three_is([&](const at::Tensor& sum) {
                at::Tensor all_but_one = sum * third;
                set_first(all_but_one, 0.3);
                return all_but_one;
              }),
              Not(HasSubstr("reciprocal")));
}

/// A bf16 parameter after a step and its master; `made` says what the run has of the master.
std::string made_of_master(const std::function<at::Tensor(at::Tensor master)>& made) {
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
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, MastersThatAreCutOffAreTold) {
  const auto cut_off = [](const at::Tensor& master) {
    return master.view(at::kInt).bitwise_and(-65536).view(at::kFloat).to(at::kBFloat16);
  };
  const std::string words = "masters are cut off to bf16, not rounded";

  EXPECT_THAT(made_of_master(cut_off), HasSubstr(words));
  EXPECT_THAT(made_of_master([&](const at::Tensor& master) {
                at::Tensor all_but_one = cut_off(master);
                set_first(all_but_one, 3);
                return all_but_one;
              }),
              Not(HasSubstr(words)));
  EXPECT_THAT(made_of_master([&](const at::Tensor& master) { return cut_off(-master) * -1.5; }),
              Not(HasSubstr(words)));
}

}  // namespace
}  // namespace isoshard
