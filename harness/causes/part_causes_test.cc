// SPDX-License-Identifier: Apache-2.0
/// Parts of copies that do not reach all ranks, sums that lack one use of a weight, and ranks with
/// two boxes; beside each a run that looks like it and is not.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/view/evidence.h"
#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;

// Of 4096 elements, 1000 to 1511 are what dp rank 1 has of its own.
TEST(PartCauses, APartThatDoesNotReachARankIsTold) {
  const at::Tensor right = values({64, 64}, 1), own = values({64, 64}, 2);
  const auto told = [&](const std::function<void(at::Tensor & flat, int dp)>& change) {
    return cause_of_one(RecordKind::kGrad, right, [&](at::Tensor v, int dp, int) {
      at::Tensor flat = v.view({-1});
      change(flat, dp);
      return v;
    });
  };
  const auto put = [&](at::Tensor& flat, std::int64_t begin, std::int64_t count) {
    flat.narrow(0, begin, count).copy_(own.view({-1}).narrow(0, begin, count));
  };

  EXPECT_THAT(told([&](at::Tensor& flat, int dp) {
                if (dp == 1) put(flat, 1000, 512);
              }),
              IsCause(CauseId::kPartNotReached, {{"axis", "dp"},
                                                 {"coordinates", std::vector{1}},
                                                 {"begins", std::vector{1000}},
                                                 {"ends", std::vector{1511}},
                                                 {"ranks", std::vector{3, 4, 5}},
                                                 {"axes", std::vector{"dp"}}}));
  EXPECT_THAT(told([&](at::Tensor& flat, int dp) { put(flat, dp == 0 ? 512 : 2000, 256); }),
              IsCause(CauseId::kPartNotReached, {{"axis", "dp"},
                                                 {"coordinates", std::vector{0, 1}},
                                                 {"begins", std::vector{512, 2000}},
                                                 {"ends", std::vector{767, 2255}}}));
  EXPECT_THAT(told([&](at::Tensor& flat, int dp) {
                put(flat, 1000, 512);
                flat.narrow(0, 1000, 512).mul_(dp + 1);
              }),
              IsCause(CauseId::kPartWrong, {{"first", 1000}, {"last", 1511}}))
      << "no rank has it right";
  EXPECT_THAT(told([&](at::Tensor& flat, int dp) {
                if (dp == 1) flat.slice(0, 0, 4096, 300).add_(1);
              }),
              IsCause(CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"dp"}}}))
      << "single elements here and there";
  EXPECT_THAT(told([&](at::Tensor& flat, int dp) {
                if (dp == 1) put(flat, 0, 4096);
              }),
              IsCause(CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"dp"}}}))
      << "all of it";
}

/// A weight that an embedding and a head use; `change` makes what ranks hold from what each gives.
Cause tied_gradient_is(
    const std::function<at::Tensor(at::Tensor embedding, at::Tensor head, int dp)>& change) {
  constexpr std::int64_t kVocabulary = 24, kWidth = 16;
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor ids = (at::arange(14, at::kLong) * 5 % kVocabulary).reshape({2, 7}),
                       d_embed = values({2, 7, kWidth}, 3), x = values({2, 7, kWidth}, 4),
                       d_head = values({2, 7, kVocabulary}, 5);
      sink.on_record(site(RecordKind::kParam, "embed.weight", layout_of({kVocabulary, kWidth})),
                     values({kVocabulary, kWidth}, 6));
      sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({2, 7})), ids);
      sink.on_record(site(RecordKind::kActivation, "embed", layout_of({2, 7, kWidth})),
                     values({2, 7, kWidth}, 7));
      sink.on_record(site(RecordKind::kActivation, "norm", layout_of({2, 7, kWidth})), x);
      sink.on_record(site(RecordKind::kActivation, "head", layout_of({2, 7, kVocabulary})),
                     values({2, 7, kVocabulary}, 8));
      sink.on_record(site(RecordKind::kActivationGrad, "head", layout_of({2, 7, kVocabulary})),
                     d_head);
      sink.on_record(site(RecordKind::kActivationGrad, "embed", layout_of({2, 7, kWidth})),
                     d_embed);
      const at::Tensor of_embedding =
                           at::zeros({kVocabulary, kWidth})
                               .index_add(0, ids.flatten(), d_embed.reshape({-1, kWidth})),
                       of_head = at::matmul(d_head.reshape({-1, kVocabulary}).t(),
                                            x.reshape({-1, kWidth}));
      sink.on_record(site(RecordKind::kGrad, "embed.weight", layout_of({kVocabulary, kWidth})),
                     whole ? of_embedding + of_head : change(of_embedding, of_head, rank / kTp));
    });
  };
  JudgePolicy tied;
  tied.num_names["embed.weight"] = 2;
  return cause_of(body(true), body(false), tied);
}

/// What is said of a gradient [6,8] of which tp ranks hold two rows each; rank 0 and rank 2 add 0.5
/// to one of their 16 elements.
Cause wrong_elements_are(std::int64_t of_rank_0, std::int64_t of_rank_2) {
  const at::Tensor right = values({6, 8}, 1);
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int own = rank % kTp;
      const std::vector<Placement> cut = {shard(Axis::kTp, 0)};
      at::Tensor part = right.narrow(0, 2 * own, 2).clone();
      if (own != 1) part.view({-1}).select(0, own == 0 ? of_rank_0 : of_rank_2).add_(0.5);
      sink.on_record(
          site(RecordKind::kGrad, "m.x", layout_of({6, 8}, whole ? std::vector<Placement>() : cut)),
          whole ? right : part);
    });
  };
  return cause_of(body(true), body(false));
}

TEST(PartCauses, ShardsThatAreWrongAtDifferentPlacesHaveNoPlace) {
  EXPECT_THAT(wrong_elements_are(9, 3), IsNoCause());
  EXPECT_THAT(wrong_elements_are(9, 9),
              IsCause(CauseId::kOneElementWrong, {{"index", std::vector{1, 1}}, {"offset", 0.5}}));
}

TEST(PartCauses, ATiedWeightThatLacksAUseIsTold) {
  EXPECT_THAT(tied_gradient_is([](const at::Tensor& embedding, const at::Tensor& head, int dp) {
                return dp == 0 ? embedding + head : head;
              }),
              IsCause(CauseId::kTiedUseMissing, {{"present", std::vector<std::string>{"head"}},
                                                 {"missing", std::vector<std::string>{"embed"}},
                                                 {"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(tied_gradient_is([](const at::Tensor& embedding, const at::Tensor& head, int) {
                return 0.5 * embedding + head;
              }),
              IsNoCause())
      << "there, but not whole";
  EXPECT_THAT(tied_gradient_is([](const at::Tensor& embedding, const at::Tensor& head, int) {
                return head + values({24, 16}, 9) * embedding.abs().max();
              }),
              IsNoCause())
      << "something else in its place";
}

/// The gradient of a norm's weight [8] over 6 heads that three tp ranks share out, as `reduced`
/// makes it of what each of them gives [3, 8].
Cause gradient_of_heads_is(const std::function<at::Tensor(at::Tensor parts)>& reduced) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor w = 1 + 0.1 * values({8}, 1), x = values({2, 5, 6, 8}, 2), y = x * w,
                       dy = values({2, 5, 6, 8}, 3);
      const at::Tensor parts = (dy * x).sum(1).sum(0).reshape({kTp, 2, 8}).sum(1);
      const std::vector<Placement> split =
          whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kTp, 2)};
      const auto own = [&](const at::Tensor& t) {
        return whole ? t : t.narrow(2, 2 * (rank % kTp), 2).contiguous();
      };
      sink.on_record(site(RecordKind::kParam, "q_norm.weight", layout_of({8})), w);
      sink.on_record(site(RecordKind::kActivation, "q_norm", layout_of({2, 5, 6, 8}, split)),
                     own(y));
      sink.on_record(site(RecordKind::kActivationGrad, "q_norm", layout_of({2, 5, 6, 8}, split)),
                     own(dy));
      sink.on_record(site(RecordKind::kGrad, "q_norm.weight", layout_of({8})),
                     whole ? parts.sum(0) : reduced(parts));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(PartCauses, TheLargestOfRanksPartsIsTold) {
  EXPECT_THAT(
      gradient_of_heads_is([](const at::Tensor& parts) { return parts.amax(0); }),
      IsCause(CauseId::kLargestPart, {{"degree", 3}, {"axis", "tp"}, {"reduction", "sum"}}));
  EXPECT_THAT(
      gradient_of_heads_is([](const at::Tensor& parts) { return 3 * parts.amin(0); }),
      IsCause(CauseId::kSmallestPart, {{"degree", 3}, {"axis", "tp"}, {"reduction", "mean"}}));
  EXPECT_THAT(gradient_of_heads_is(
                  [](const at::Tensor& parts) { return parts.amax(0) + 0.1 * values({8}, 9); }),
              IsNoCause());
  EXPECT_THAT(gradient_of_heads_is([](const at::Tensor& parts) { return parts.abs().amax(0); }),
              IsNoCause())
      << "the largest by size";
}

/// The gradient of a norm's weight [8] after two micro-batches, as `added` makes it of what each of
/// them gives.
Cause gradient_of_norm_is(
    const std::function<at::Tensor(at::Tensor first, at::Tensor second)>& added) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor w = 1 + 0.1 * values({8}, 1);
      sink.on_record(site(RecordKind::kParam, "n.weight", layout_of({8})), w);
      std::vector<at::Tensor> parts;
      for (int m = 0; m < 2; ++m) {
        const at::Tensor x = values({2, 5, 8}, 2 + m), dy = values({2, 5, 8}, 6 + m);
        sink.on_record(site(RecordKind::kActivation, "n", layout_of({2, 5, 8})), x * w);
        sink.on_record(site(RecordKind::kActivationGrad, "n", layout_of({2, 5, 8})), dy);
        parts.push_back((dy * x).sum(1).sum(0));
      }
      sink.on_record(site(RecordKind::kGrad, "n.weight", layout_of({8})),
                     whole ? parts[0] + parts[1] : added(parts[0], parts[1]));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(PartCauses, MicroBatchesOfANormsWeightAreTold) {
  EXPECT_THAT(
      gradient_of_norm_is([](const at::Tensor&, const at::Tensor& second) { return second; }),
      IsCause(CauseId::kMicroBatchMissing,
              {{"present", std::vector{1}}, {"missing", std::vector{0}}, {"last", 1}}));
  EXPECT_THAT(gradient_of_norm_is([](const at::Tensor&, const at::Tensor& second) {
                return second + 0.1 * values({8}, 9);
              }),
              IsNoCause());
}

/// 8 tokens that two cp ranks share, head and tail of them on rank 0; `change` is put on what a
/// rank holds of its box that begins at a token.
Cause boxes_are(const std::function<at::Tensor(at::Tensor own, std::int64_t begin)>& change) {
  const at::Tensor right = values({2, 8, 16}, 1);
  const Reference r = reference([&](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivation, "m", layout_of({2, 8, 16})), right);
  });
  const Trace trace = run(MeshShape({{Axis::kCp, 2}}), &r, [&](Sink& sink, int rank) {
    Layout layout = layout_of({2, 8, 16});
    layout.explicit_parts = true;
    std::vector<at::Tensor> parts;
    std::int64_t before = 0;
    const auto add = [&](std::int64_t begin, std::int64_t count) {
      layout.boxes.push_back(Box{{0, before, 0}, {0, begin, 0}, {2, count, 16}});
      parts.push_back(change(right.narrow(1, begin, count).clone(), begin));
      before += count;
    };
    add(rank == 0 ? 0 : 2, rank == 0 ? 2 : 4);
    if (rank == 0) add(6, 2);
    sink.on_record(site(RecordKind::kActivation, "m", layout), at::cat(parts, 1));
  });
  JudgePolicy options;
  options.rtol = 1e-6;
  const Verdict verdict = judge(r, trace, options);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.at(0).cause;
}

TEST(PartCauses, EachBoxOfARankIsLookedAt) {
  const auto rounded = [](const at::Tensor& x) { return x.to(at::kBFloat16).to(at::kFloat); };

  EXPECT_THAT(boxes_are([&](const at::Tensor& own, std::int64_t) { return rounded(own); }),
              IsCause(CauseId::kRounded, {{"dtype", "bf16"}, {"values", 256}}));
  EXPECT_THAT(boxes_are([&](const at::Tensor& own, std::int64_t begin) {
                return begin == 6 ? own : rounded(own);
              }),
              IsCause(CauseId::kRounded, {{"dtype", "bf16"}, {"values", 192}}))
      << "a box of a wrong rank that is right";
  EXPECT_THAT(boxes_are([&](const at::Tensor& own, std::int64_t begin) {
                return begin == 6 ? own * 1.001 : rounded(own);
              }),
              IsNoCause())
      << "a box that is wrong in another way";
}

// Patterns count bits and sort numbers, which a number must have.
TEST(PartCauses, NothingIsToldBesideWhatTheReferenceHasNotFinite) {
  const auto body = [](double first) {
    return Body([=](Sink& sink, int) {
      at::Tensor value = values({16, 8}, 1);
      set_first(value, first);
      sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({16, 8})), value);
    });
  };
  for (const double odd : {std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity(), std::nan("")}) {
    const Reference r = reference(body(odd));
    const Trace trace = run(kMesh, &r, body(0.5), Keep::kEverything);
    const RecordKey key{0, RecordKind::kGrad, "m.w", 0};
    std::vector<detail::Held> held;
    for (const RankTrace& rank : trace.ranks) held.push_back({&rank, rank.find(key)});
    detail::TensorResult result;
    result.findings.emplace_back();
    result.findings.back().ranks = {0};

    const detail::Evidence evidence(r, *r.find(key), trace, held, result, {});

    EXPECT_TRUE(evidence.whole.defined());
    EXPECT_TRUE(evidence.views.empty());
    EXPECT_TRUE(detail::cause_rounding(evidence).empty());
  }
}

}  // namespace
}  // namespace isoshard
