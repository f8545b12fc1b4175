// SPDX-License-Identifier: Apache-2.0
/// Claims about equality by digests: it holds for equal runs however they say their layouts, and
/// for no others.
#include "harness/verdict/equal_runs.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::HasSubstr;

/// What `change` may do to rank 4's share of a run of a few tensors.
struct Changed {
  std::function<void(at::Tensor& shard)> shard = {};
  std::function<void(Site& site)> site = {};
  std::function<void(Sink& sink)> more = {};
  bool leaves_out_weight = false, says_boxes = false, other_order = false;
};

Trace run_of(const Changed& changed = {}) {
  return run(
      kDp2Tp3, nullptr,
      [&changed](Sink& sink, int rank) {
        const int tp = rank % 3;
        const bool here = rank == 4;
        at::Tensor own = values({6, 4}, 1).narrow(0, 2 * tp, 2).clone();
        own[0][0] = 0;
        if (here && changed.shard) changed.shard(own);
        Site weight = site(RecordKind::kGrad, "w", layout_of({6, 4}, {shard(Axis::kTp, 0)}));
        if (changed.says_boxes) {
          weight.layout.placements.clear();
          weight.layout.boxes = {{{0, 0}, {2 * tp, 0}, {2, 4}}};
          weight.layout.explicit_parts = true;
        }
        if (here && changed.site) changed.site(weight);
        const auto record_weight = [&] {
          if (!here || !changed.leaves_out_weight) sink.on_record(weight, own);
        };
        if (!changed.other_order) record_weight();
        sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                       at::ones({1}, at::kDouble));
        if (changed.other_order) record_weight();
        sink.on_record(
            site(RecordKind::kActivation, "x.partial", layout_of({2}, {partial(Axis::kTp)})),
            values({2}, rank));
        if (here && changed.more) changed.more(sink);
      },
      Keep::kNothing);
}

std::string difference(const Changed& changed) {
  const RunEquality equality = equality_of(run_of(), run_of(changed));
  EXPECT_EQ(equality.holds(), equality.difference.empty());
  return equality.difference;
}

TEST(EqualRuns, HoldsForEqualRunsHoweverTheySayTheirLayouts) {
  const RunEquality equality =
      equality_of(run_of(), run_of({.says_boxes = true, .other_order = true}));

  EXPECT_TRUE(equality.holds()) << equality.difference;
  EXPECT_EQ(equality.tensors, 2)
      << "the summands are compared, but they are no tensors of the model";
}

TEST(EqualRuns, NamesTheTensorAndTheRankOfOneOtherBit) {
  const auto one_ulp = [](at::Tensor& own) {
    own[1][3] = std::nextafter(own[1][3].item<float>(), 9.F);
  };
  EXPECT_EQ(difference({.shard = one_ulp}), "gradient of w (step 0) differs on rank 4");
  const auto signed_zero = [](at::Tensor& own) { own[0][0] = -0.F; };
  EXPECT_EQ(difference({.shard = signed_zero}), "gradient of w (step 0) differs on rank 4");
}

TEST(EqualRuns, NamesOtherRecordsAndWhatTheySay) {
  EXPECT_THAT(difference({.site = [](Site& site) { site.grad_scale = 2; }}),
              HasSubstr("gradient scale 2, not 1"));
  EXPECT_THAT(difference({.site = [](Site& site) { site.name = "v"; }}),
              HasSubstr("gradient of v (step 0) was recorded, which is not expected, on rank 4"));
  EXPECT_THAT(difference({.leaves_out_weight = true}),
              HasSubstr("gradient of w (step 0) was not recorded on rank 4"));
  EXPECT_THAT(difference({.more =
                              [](Sink& sink) {
                                sink.on_record(site(RecordKind::kScalar, "y", layout_of({1})),
                                               at::ones({1}));
                              }}),
              HasSubstr("y (step 0) was recorded, which is not expected, on rank 4"));
  EXPECT_THAT(difference({.shard = [](at::Tensor& own) { own = own.to(at::kDouble); }}),
              HasSubstr("is fp64, not fp32"));
  // The same bytes at another place.
  EXPECT_THAT(difference({.site =
                              [](Site& site) {
                                site.layout.placements.clear();
                                site.layout.boxes = {{{0, 0}, {0, 0}, {2, 4}}};
                                site.layout.explicit_parts = true;
                              }}),
              HasSubstr("gradient of w (step 0) differs on rank 4"));
}

// Rank 1 goes wrong in the second tensor, rank 4 in the first: by execution rank 4 is the first.
TEST(EqualRuns, TheFirstDifferenceIsThatOfExecutionAndIsData) {
  const auto run_with = [](double first_of_rank_4, double second_of_rank_1) {
    return run(
        kDp2Tp3, nullptr,
        [=](Sink& sink, int rank) {
          sink.on_record(site(RecordKind::kScalar, "z", layout_of({1})),
                         at::full({1}, rank == 4 ? first_of_rank_4 : 1.0));
          sink.on_record(site(RecordKind::kScalar, "a", layout_of({1})),
                         at::full({1}, rank == 1 ? second_of_rank_1 : 1.0));
        },
        Keep::kNothing);
  };

  const RunEquality equality = equality_of(run_with(1, 1), run_with(2, 2));

  ASSERT_TRUE(equality.first.has_value());
  ASSERT_TRUE(equality.first->key.has_value());
  EXPECT_EQ(equality.first->key->name, "z");
  EXPECT_EQ(equality.first->rank, 4);
  EXPECT_EQ(equality.first->describe(), equality.difference);
  EXPECT_FALSE(equality_of(run_with(1, 1), run_with(1, 1)).first.has_value());
}

TEST(EqualRuns, NothingEqualsNothingIsNoEquality) {
  EXPECT_FALSE(equality_of(Trace(), Trace()).holds());
  Trace fewer = run_of();
  fewer.ranks.pop_back();
  EXPECT_THAT(equality_of(run_of(), fewer).difference, HasSubstr("5 ranks instead of 6"));
}

}  // namespace
}  // namespace isoshard
