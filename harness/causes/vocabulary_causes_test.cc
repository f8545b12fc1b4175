// SPDX-License-Identifier: Apache-2.0
/// Causes in the rows of a vocabulary, and beside each a run that looks like it and is not.
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

constexpr std::int64_t kVocabulary = 24, kWidth = 16;

/// Ids of which 1, 3, 5, 7 and 9 come once and 2, 4, 6, 8 twice.
at::Tensor batch_ids() {
  return at::tensor({1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 4, 6, 8, 9 + 1}, at::kLong).reshape({2, 7});
}

/// The gradient of an embedding: each id's row is the sum over its places.
at::Tensor row_sums(const at::Tensor& ids, const at::Tensor& dy) {
  return at::zeros({kVocabulary, kWidth}).index_add(0, ids.flatten(), dy.reshape({-1, kWidth}));
}

Cause rows_are(const RankChange& change) {
  const at::Tensor ids = batch_ids(), dy = values({2, 7, kWidth}, 3);
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({2, 7})), ids);
      sink.on_record(site(RecordKind::kActivationGrad, "embed", layout_of({2, 7, kWidth})), dy);
      sink.on_record(site(RecordKind::kGrad, "embed.weight", layout_of({kVocabulary, kWidth})),
                     changed(change, row_sums(ids, dy), rank, whole));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, RowsOfAbsentIdsAreTold) {
  EXPECT_THAT(
      rows_are([](at::Tensor rows, int, int) {
        rows.narrow(0, 12, 3).fill_(0.25);
        return rows;
      }),
      IsCause(CauseId::kRowsOfAbsentIds,
              {{"record", "input_ids"}, {"num_rows", 3}, {"rows", std::vector{12, 13, 14}}}));
  EXPECT_THAT(rows_are([](at::Tensor rows, int, int) {
                rows.narrow(0, 12, 3).fill_(0.25);
                rows.narrow(0, 4, 1).mul_(3);
                return rows;
              }),
              IsNoCause())
      << "another row is wrong, too";
  EXPECT_THAT(rows_are([](at::Tensor rows, int, int) {
                rows[12][3] = 0.25;
                return rows;
              }),
              IsCause(CauseId::kOneElementWrong))
      << "one element is no row";
}

TEST(ClassCauses, RepeatedIdsThatAreNotSummedAreTold) {
  const at::Tensor ids = batch_ids().flatten(),
                   dy = values({2, 7, kWidth}, 3).reshape({-1, kWidth});

  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (std::int64_t i = 0; i < ids.numel(); ++i)
                  rows.select(0, ids[i].item<std::int64_t>()).copy_(dy[i]);
                return rows;
              }),
              IsCause(CauseId::kRepeatedIdsNotSummed, {{"num_rows", 4},
                                                       {"record", "input_ids"},
                                                       {"rows", std::vector{2, 4, 6, 8}},
                                                       {"is_last_occurrence", true}}));
  EXPECT_THAT(
      rows_are([&](at::Tensor rows, int, int) {
        for (const std::int64_t id : {2, 4, 6, 8}) rows.select(0, id).div_(2);
        return rows;
      }),
      IsCause(CauseId::kRepeatedIdsAveraged,
              {{"num_rows", 4}, {"record", "input_ids"}, {"rows", std::vector{2, 4, 6, 8}}}));
  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (const std::int64_t id : {2, 4, 6, 8}) rows.select(0, id).mul_(0.7);
                return rows;
              }),
              IsCause(CauseId::kPartWrong));
}

TEST(ClassCauses, RowsOfOtherIdsThatWereReadAreTold) {
  const at::Tensor ids = batch_ids(), weight = values({kVocabulary, kWidth}, 3);
  const auto read = [&](const std::function<at::Tensor(at::Tensor ids)>& from) {
    const auto body = [&](bool whole) {
      return Body([=](Sink& sink, int) {
        sink.on_record(site(RecordKind::kParam, "embed.weight", layout_of({kVocabulary, kWidth})),
                       weight);
        sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({2, 7})), ids);
        sink.on_record(site(RecordKind::kActivation, "embed", layout_of({2, 7, kWidth})),
                       at::embedding(weight, whole ? ids : from(ids)));
      });
    };
    return cause_of(body(true), body(false));
  };

  EXPECT_THAT(read([](const at::Tensor& own) { return own + 2; }),
              IsCause(CauseId::kRowsOfOtherIds,
                      {{"sign", "+"}, {"away", 2}, {"parameter", "embed.weight"}}));
  EXPECT_THAT(
      read([](const at::Tensor& own) { return at::where(own > 4, own - 1, own); }),
      IsCause(
          CauseId::kRowsOfOtherIds,
          {{"first", 5}, {"last", 10}, {"sign", "-"}, {"away", 1}, {"parameter", "embed.weight"}}));
  EXPECT_THAT(read([](const at::Tensor& own) { return 23 - own; }), IsNoCause());
}

/// An embedding whose rows tp ranks share out; `change` makes what all ranks get from the right
/// one, the ids and the weight.
TEST(ClassCauses, ARowThatAForeignRankAddsIsTold) {
  const at::Tensor ids = batch_ids(), weight = values({kVocabulary, kWidth}, 3);
  const auto told =
      [&](const std::function<at::Tensor(at::Tensor right, at::Tensor is_low)>& change) {
        const auto body = [&](bool whole) {
          return Body([=](Sink& sink, int) {
            sink.on_record(
                site(RecordKind::kParam, "embed.weight", layout_of({kVocabulary, kWidth})), weight);
            sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({2, 7})), ids);
            const at::Tensor right = at::embedding(weight, ids);
            sink.on_record(site(RecordKind::kActivation, "embed", layout_of({2, 7, kWidth})),
                           whole ? right : change(right, (ids < 8).unsqueeze(-1)));
          });
        };
        return cause_of(body(true), body(false));
      };

  EXPECT_THAT(
      told([&](const at::Tensor& right, const at::Tensor& is_low) {
        return right + is_low * weight[8];
      }),
      IsCause(CauseId::kRowAddedToForeignIds,
              {{"num_tokens", 10}, {"num_ids", 7}, {"row", 8}, {"parameter", "embed.weight"}}));
  EXPECT_THAT(told([&](const at::Tensor& right, const at::Tensor& is_low) {
                return right + is_low * weight[8].roll(1, 0);
              }),
              IsNoCause())
      << "it is no row of the weight";
  EXPECT_THAT(told([&](const at::Tensor& right, const at::Tensor& is_low) {
                at::Tensor off = right + is_low * weight[8];
                off.select(0, 1).select(0, 3).mul_(2);
                return off;
              }),
              IsNoCause())
      << "a token is wrong in another way";
}

// Rows 0..3 have targets on tp rank 0, the others on ranks 1 and 2.
TEST(ClassCauses, TargetsOfOtherRanksThatAreNotMaskedAreTold) {
  const at::Tensor labels = at::tensor({0, 1, 2, 3, 4, 5, 8, 11}, at::kLong).reshape({2, 4}),
                   logits = values({2, 4, 12}, 5);
  const at::Tensor right =
      (at::softmax(logits, -1) - at::one_hot(labels, 12).to(at::kFloat)) * 0.125;
  const auto told = [&](const std::function<void(at::Tensor & own)>& change_rank_0) {
    const auto body = [&](bool whole) {
      return Body([=](Sink& sink, int rank) {
        const std::vector<Placement> split =
            whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kTp, 2)};
        sink.on_record(site(RecordKind::kDataId, "labels", layout_of({2, 4})), labels);
        const auto part = [&](const at::Tensor& value) {
          return whole ? value : value.narrow(2, 4 * (rank % kTp), 4).clone();
        };
        sink.on_record(site(RecordKind::kActivation, "head", layout_of({2, 4, 12}, split)),
                       part(logits));
        at::Tensor own = part(right);
        if (!whole && rank % kTp == 0) change_rank_0(own);
        sink.on_record(site(RecordKind::kActivationGrad, "head", layout_of({2, 4, 12}, split)),
                       own);
      });
    };
    return cause_of(body(true), body(false));
  };

  EXPECT_THAT(
      told([](at::Tensor& own) { own.select(0, 1).select(1, 0).sub_(0.125); }),
      IsCause(CauseId::kForeignTargetsNotMasked, {{"column", 0}, {"ranks", std::vector{0, 3}}}));
  EXPECT_THAT(told([](at::Tensor& own) { own.select(2, 0).sub_(0.125); }),
              IsCause(CauseId::kLogitRowsNotZero))
      << "rows of own targets are wrong, too";
  EXPECT_THAT(told([](at::Tensor& own) { own.select(0, 1).sub_(0.125); }),
              IsCause(CauseId::kPartOffset, {{"dim", 0}, {"first", 1}, {"last", 1}}))
      << "more than one column";
}

/// The gradient of 8 rows of logits, 12 columns each; `change` gets right gradient and logits.
Cause logit_gradient_is(
    const std::function<at::Tensor(at::Tensor right, at::Tensor logits)>& change) {
  const at::Tensor labels = at::arange(8, at::kLong).reshape({2, 4}),
                   logits = values({2, 4, 12}, 5);
  const at::Tensor right =
      (at::softmax(logits, -1) - at::one_hot(labels, 12).to(at::kFloat)) * 0.125;
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({2, 4})), labels);
      sink.on_record(site(RecordKind::kActivation, "head", layout_of({2, 4, 12})), logits);
      sink.on_record(site(RecordKind::kActivationGrad, "head", layout_of({2, 4, 12})),
                     whole ? right : change(right.clone(), logits));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, RowsOfALogitGradientThatDoNotSumToZeroAreTold) {
  EXPECT_THAT(logit_gradient_is([](const at::Tensor&, const at::Tensor& logits) {
                return at::softmax(logits, -1) * 0.125;
              }),
              IsCause(CauseId::kTargetNotSubtracted, {{"off", 8}, {"num_rows", 8}, {"worst", 1}}));
  EXPECT_THAT(logit_gradient_is(
                  [](const at::Tensor& right, const at::Tensor&) { return right.roll(1, 2); }),
              IsCause(CauseId::kSlicesShifted))
      << "wrong rows whose sum is 0";
  EXPECT_THAT(logit_gradient_is([](at::Tensor right, const at::Tensor&) {
                right.select(0, 0).select(0, 0).add_(0.1);
                return right;
              }),
              IsCause(CauseId::kPartOffset, {{"first", 0}, {"last", 11}}))
      << "one row of eight";
}

}  // namespace
}  // namespace isoshard
