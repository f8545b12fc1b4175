// SPDX-License-Identifier: Apache-2.0
/// Claims about what stands beside a verdict, on a weight that is split over tp and copied over dp.
#include "harness/evidence/evidence.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "harness/judge/judge.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

/// Two layers of one weight [6, 4] each, split over 3 tp ranks; `change` edits a rank's own shard
/// of layer 1.
Body weights(bool whole, std::function<void(at::Tensor& shard, int rank)> change = {}) {
  return [whole, change](Sink& sink, int rank) {
    for (int layer = 0; layer < 2; ++layer) {
      at::Tensor local = values({6, 4}, layer + 1);
      if (!whole) local = local.narrow(0, rank % 3 * 2, 2).clone();
      if (layer == 1 && change) change(local, rank);
      sink.on_record(site(RecordKind::kGrad, "layers." + std::to_string(layer) + ".w",
                          layout_of({6, 4}, {shard(Axis::kTp, 0)})),
                     local);
    }
  };
}

const RecordKey kFirst{0, RecordKind::kGrad, "layers.1.w", 0};

Evidence evidence_on(const std::function<void(at::Tensor&, int)>& change) {
  const Reference reference = synthetic::reference(weights(true));
  const Trace actual = run(kDp2Tp3, &reference, weights(false, change));
  const std::vector<RecordKey> around = {{0, RecordKind::kGrad, "layers.0.w", 0}, kFirst};
  return evidence_of(reference, actual, around, kFirst);
}

TEST(Evidence, SaysOnceWhoHoldsTensorsThatAreAlikeButForTheirLayer) {
  const Evidence evidence = evidence_on({});

  ASSERT_THAT(evidence.placements, SizeIs(1));
  const HeldTensor& held = evidence.placements[0];
  EXPECT_EQ(held.key.name, "layers.0.w");
  EXPECT_EQ(held.placement, "tp:shard(0)");
  ASSERT_THAT(held.parts, SizeIs(6));
  EXPECT_EQ(held.parts[5].rank, 5);
  EXPECT_THAT(held.parts[5].begin, ElementsAre(4, 0));
  EXPECT_THAT(held.parts[5].size, ElementsAre(2, 4));
}

TEST(Evidence, HasTheErrorOfEachRank) {
  const Evidence evidence = evidence_on([](at::Tensor& shard, int rank) {
    if (rank == 4) shard.mul_(2);
  });

  ASSERT_THAT(evidence.around, SizeIs(2));
  for (const HeldPart& part : evidence.around[0].parts) EXPECT_EQ(part.unequal, 0);
  for (const HeldPart& part : evidence.around[1].parts) {
    EXPECT_EQ(part.unequal, part.rank == 4 ? 8 : 0) << part.rank;
    EXPECT_FLOAT_EQ(static_cast<float>(part.relative_error), part.rank == 4 ? 1 : 0) << part.rank;
  }
}

TEST(Evidence, ShowsNumbersOfBothSidesWhereTheyBeginToDiffer) {
  const Evidence evidence = evidence_on([](at::Tensor& shard, int rank) {
    if (rank == 1) shard.index_put_({at::tensor(1), at::tensor(2)}, 7.5);  // row 3 of the whole
  });

  ASSERT_TRUE(evidence.numbers.has_value());
  const NumbersBeside& numbers = *evidence.numbers;
  EXPECT_TRUE(numbers.is_whole);
  EXPECT_EQ(numbers.row, 0);
  ASSERT_GE(numbers.sides.size(), 3U);
  EXPECT_EQ(numbers.sides[0].rank, -1);
  EXPECT_EQ(numbers.sides[2].rank, 1);
  EXPECT_EQ(numbers.sides[2].rows[3][2], 7.5);
  EXPECT_NE(numbers.sides[0].rows[3][2], 7.5);
  EXPECT_EQ(numbers.sides[2].rows[3][1], numbers.sides[0].rows[3][1]);
  EXPECT_EQ(numbers.sides[2].rows[0][0], std::nullopt);  // rank 0 holds it
  // rank 0 kept nothing, as its bits are the reference's
  EXPECT_EQ(numbers.sides[1].rows[0][0], numbers.sides[0].rows[0][0]);
}

TEST(Evidence, ShowsACornerOfALargeTensorAroundTheFirstDifference) {
  const auto body = [](double changed) -> Body {
    return [changed](Sink& sink, int) {
      at::Tensor weight = values({50, 40}, 1);
      if (changed != 0) weight.index_put_({at::tensor(20), at::tensor(39)}, changed);
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({50, 40})), weight);
    };
  };
  const Reference reference = synthetic::reference(body(0));
  const RecordKey key{0, RecordKind::kGrad, "w", 0};

  const Evidence evidence = evidence_of(reference, run(MeshShape(), &reference, body(9)), {}, key);

  ASSERT_TRUE(evidence.numbers.has_value());
  EXPECT_FALSE(evidence.numbers->is_whole);
  EXPECT_EQ(evidence.numbers->row, 19);
  EXPECT_EQ(evidence.numbers->column, 35);
  EXPECT_EQ(evidence.numbers->sides[1].rows[1][4], 9);
}

TEST(Evidence, HasNoNumbersOfARunThatKeptNone) {
  const Reference reference = synthetic::reference(weights(true));
  const Trace actual =
      run(kDp2Tp3, &reference, weights(false, [](at::Tensor& shard, int) { shard.mul_(2); }),
          Keep::kNothing);
  EXPECT_FALSE(evidence_of(reference, actual, {}, kFirst).numbers.has_value());
}

TEST(Evidence, OfOtherWeightsHasAnotherDigest) {
  const auto digests = [](double factor) {
    const auto body = [factor](Sink& sink, int) {
      sink.on_record(site(RecordKind::kParam, "w", layout_of({2, 2})), values({2, 2}, 1) * factor);
    };
    const Reference reference = synthetic::reference(body);
    return evidence_of(reference, run(MeshShape(), &reference, body), {}, {}).digests;
  };
  EXPECT_THAT(digests(1), SizeIs(1));
  EXPECT_EQ(digests(1), digests(1));
  EXPECT_NE(digests(1), digests(2));
}

TEST(Evidence, OfAVerdictIsAboutItsFirstFinding) {
  const Reference reference =
      synthetic::reference(weights(true), [](int) { return weights(true); });
  const Trace actual =
      run(kDp2Tp3, &reference, weights(false, [](at::Tensor& shard, int) { shard.mul_(2); }));

  const Verdict verdict = judge(reference, actual, {});

  ASSERT_FALSE(verdict.findings.empty());
  ASSERT_THAT(verdict.evidence.around, SizeIs(2));
  EXPECT_EQ(verdict.evidence.around[1].key, verdict.findings[0].key);
  ASSERT_TRUE(verdict.evidence.numbers.has_value());
  EXPECT_EQ(verdict.evidence.numbers->key, kFirst);
}

}  // namespace
}  // namespace isoshard
