// SPDX-License-Identifier: Apache-2.0
/// Claims about equality by digests: it holds for equal runs however they say their layouts, and
/// for no others.
#include "harness/verdict/equal_runs.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <set>

#include "core/memory/unwritten.h"
#include "core/tensor/convert.h"
#include "harness/stats/stats.h"
#include "harness/testing/synthetic.h"
#include "harness/trace/parts.h"

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

/// Writes 32 bits into the shard's first element.
std::function<void(at::Tensor&)> with_bits(std::uint32_t bits) {
  return [bits](at::Tensor& own) { std::memcpy(own.mutable_data_ptr(), &bits, sizeof bits); };
}

// A NaN's sign and payload are any; where it is, and that it was computed at all, are not.
TEST(EqualRuns, ANanEqualsAnyNanThatWasComputed) {
  constexpr std::uint32_t kQuiet = 0x7FC00000, kOther = 0xFFC00001, kInfinity = 0x7F800000;
  const std::uint32_t word = unwritten_word(7), unwritten = word << 16U | word;
  const auto differ = [](std::uint32_t expected, std::uint32_t actual) {
    return equality_of(run_of({.shard = with_bits(expected)}), run_of({.shard = with_bits(actual)}))
        .difference;
  };

  EXPECT_EQ(differ(kQuiet, kOther), "");
  EXPECT_EQ(differ(unwritten, unwritten), "");
  for (const std::uint32_t other : {std::uint32_t{0}, kInfinity, unwritten})
    EXPECT_EQ(differ(kQuiet, other), "gradient of w (step 0) differs on rank 4") << other;
  const auto elsewhere = [](at::Tensor& own) { own[1][1] = std::nanf(""); };
  EXPECT_EQ(
      equality_of(run_of({.shard = with_bits(kQuiet)}), run_of({.shard = elsewhere})).difference,
      "gradient of w (step 0) differs on rank 4");
}

class DigestOfPart : public ::testing::TestWithParam<at::ScalarType> {};

// The place decides nothing: not the first block, not a rest of the vectorized loop.
TEST_P(DigestOfPart, SeesNansAtEveryPlaceAndIsThatOfTheBytesWithoutOne) {
  constexpr std::int64_t kCount = 9000;
  const at::Tensor numbers = values({kCount}, 3).to(GetParam());
  const Dtype dtype = host_tensor_of(numbers).dtype;
  const auto digest = [&](const at::Tensor& tensor) {
    return digest_of_part(host_tensor_of(tensor).bytes.data(), dtype, kCount);
  };
  std::set<std::uint64_t> digests{digest(numbers)};

  EXPECT_EQ(*digests.begin(), digest_of(host_tensor_of(numbers).bytes.data(),
                                        static_cast<std::size_t>(kCount) * size_of(dtype)));
  for (const std::int64_t place : {0, 1, 4095, 4096, 8191, 8999}) {
    const at::Tensor nan = numbers.clone(), other = numbers.clone();
    nan[place] = std::nan("");
    other[place] = -std::nan("");
    const HostTensor a = host_tensor_of(nan), b = host_tensor_of(other);
    EXPECT_NE(std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()), 0) << "one NaN twice";
    EXPECT_EQ(digest(nan), digest(other)) << place;
    EXPECT_TRUE(digests.insert(digest(nan)).second) << place;
  }
}
INSTANTIATE_TEST_SUITE_P(Dtypes, DigestOfPart,
                         ::testing::Values(at::kDouble, at::kFloat, at::kHalf));

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
