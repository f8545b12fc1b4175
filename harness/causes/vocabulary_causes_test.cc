// SPDX-License-Identifier: Apache-2.0
/// Causes in the rows of a vocabulary, and beside each a run that looks like it and is not.
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
using testing::HasSubstr;
using testing::Not;

constexpr std::int64_t kVocabulary = 24, kWidth = 16;

/// Ids of which 1, 3, 5, 7 and 9 come once and 2, 4, 6, 8 twice.
at::Tensor batch_ids() {
  return at::tensor({1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 4, 6, 8, 9 + 1}, at::kLong).reshape({2, 7});
}

/// The gradient of an embedding: each id's row is the sum over its places.
at::Tensor row_sums(const at::Tensor& ids, const at::Tensor& dy) {
  return at::zeros({kVocabulary, kWidth}).index_add(0, ids.flatten(), dy.reshape({-1, kWidth}));
}

std::string rows_are(const RankChange& change) {
  const at::Tensor ids = batch_ids(), dy = values({2, 7, kWidth}, 3);
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({2, 7})), ids);
      sink.on_record(site(RecordKind::kActivationGrad, "embed", layout_of({2, 7, kWidth})), dy);
      sink.on_record(site(RecordKind::kGrad, "embed.weight", layout_of({kVocabulary, kWidth})),
                     changed(change, row_sums(ids, dy), rank, whole));
    });
  };
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, RowsOfAbsentIdsAreTold) {
  EXPECT_THAT(rows_are([](at::Tensor rows, int, int) {
                rows.narrow(0, 12, 3).fill_(0.25);
                return rows;
              }),
              HasSubstr("rows of ids that are not in input_ids: 3 rows (12, 13, 14) must be 0"));
  EXPECT_THAT(rows_are([](at::Tensor rows, int, int) {
                rows.narrow(0, 12, 3).fill_(0.25);
                rows.narrow(0, 4, 1).mul_(3);
                return rows;
              }),
              Not(HasSubstr("must be 0")))
      << "another row is wrong, too";
}

TEST(ClassCauses, RepeatedIdsThatAreNotSummedAreTold) {
  const at::Tensor ids = batch_ids().flatten(),
                   dy = values({2, 7, kWidth}, 3).reshape({-1, kWidth});

  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (std::int64_t i = 0; i < ids.numel(); ++i)
                  rows.select(0, ids[i].item<std::int64_t>()).copy_(dy[i]);
                return rows;
              }),
              HasSubstr("repeated ids are not summed: rows of 4 repeated ids in input_ids have the "
                        "gradient of the last occurrence alone"));
  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (const std::int64_t id : {2, 4, 6, 8}) rows.select(0, id).div_(2);
                return rows;
              }),
              HasSubstr("rows of the 4 repeated ids in input_ids are divided by how often"));
  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (const std::int64_t id : {2, 4, 6, 8}) rows.select(0, id).mul_(0.7);
                return rows;
              }),
              Not(HasSubstr("repeated ids")));
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
    return diagnosis_of(body(true), body(false));
  };

  EXPECT_THAT(read([](const at::Tensor& own) { return own + 2; }),
              HasSubstr("have row id + 2 of embed.weight"));
  EXPECT_THAT(read([](const at::Tensor& own) { return at::where(own > 4, own - 1, own); }),
              HasSubstr("from 5 to 10 have row id - 1 of embed.weight"));
  EXPECT_THAT(read([](const at::Tensor& own) { return 23 - own; }), Not(HasSubstr("have row id")));
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
        return diagnosis_of(body(true), body(false));
      };

  EXPECT_THAT(told([&](const at::Tensor& right, const at::Tensor& is_low) {
                return right + is_low * weight[8];
              }),
              HasSubstr("10 tokens of 7 ids have row 8 of embed.weight added"));
  EXPECT_THAT(told([&](const at::Tensor& right, const at::Tensor& is_low) {
                return right + is_low * weight[8].roll(1, 0);
              }),
              Not(HasSubstr("added")))
      << "it is no row of the weight";
  EXPECT_THAT(told([&](const at::Tensor& right, const at::Tensor& is_low) {
                at::Tensor off = right + is_low * weight[8];
                off.select(0, 1).select(0, 3).mul_(2);
                return off;
              }),
              Not(HasSubstr("added")))
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
    return diagnosis_of(body(true), body(false));
  };

  EXPECT_THAT(told([](at::Tensor& own) { own.select(0, 1).select(1, 0).sub_(0.125); }),
              HasSubstr("whose target other ranks hold are wrong at column 0 of a rank's part: "
                        "targets of theirs are not masked"));
  EXPECT_THAT(told([](at::Tensor& own) { own.select(2, 0).sub_(0.125); }),
              Not(HasSubstr("not masked")))
      << "rows of own targets are wrong, too";
  EXPECT_THAT(told([](at::Tensor& own) { own.select(0, 1).sub_(0.125); }),
              Not(HasSubstr("not masked")))
      << "more than one column";
}

/// The gradient of 8 rows of logits, 12 columns each; `change` gets right gradient and logits.
std::string logit_gradient_is(
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
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, RowsOfALogitGradientThatDoNotSumToZeroAreTold) {
  EXPECT_THAT(logit_gradient_is([](const at::Tensor&, const at::Tensor& logits) {
                return at::softmax(logits, -1) * 0.125;
              }),
              HasSubstr("rows of the logits' gradient do not sum to 0 (8 of 8 rows, up to 1 of "
                        "their absolute sum): the target's 1 is not subtracted"));
  EXPECT_THAT(logit_gradient_is(
                  [](const at::Tensor& right, const at::Tensor&) { return right.roll(1, 2); }),
              Not(HasSubstr("sum to 0")))
      << "wrong rows whose sum is 0";
  EXPECT_THAT(logit_gradient_is([](at::Tensor right, const at::Tensor&) {
                right.select(0, 0).select(0, 0).add_(0.1);
                return right;
              }),
              Not(HasSubstr("sum to 0")))
      << "one row of eight";
}

}  // namespace
}  // namespace isoshard
