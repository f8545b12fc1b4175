// SPDX-License-Identifier: Apache-2.0
/// Kernel bodies on emulated grids say what the CPU's loops say: counts, maxima, positions and
/// digests exactly, sums within 1e-12.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/stats/device/device_stats.h"
#include "harness/stats/device/emulated_grid.h"
#include "harness/stats/device/test_pairs.h"

namespace isoshard {
namespace {

class DeviceCompareBodyOf : public testing::TestWithParam<Dtype> {};

TEST_P(DeviceCompareBodyOf, EverySizeAndChangeIsAsOnTheCpu) {
  const Dtype dtype = GetParam();
  std::uint32_t seed = 0;
  for (const std::int64_t count : kCounts) {
    for (const Change change : kChanges) {
      const Pair pair = make_pair(dtype, count, change, ++seed);
      for (const double scale : {1.0, 3.0}) {
        Stats want;
        Stats got;
        Stats of_three_warps;
        accumulate(want, pair.reference.data(), dtype, pair.actual.data(), dtype, count, 1000,
                   scale);

        device::emulate_accumulate(got, pair.reference.data(), dtype, pair.actual.data(), dtype,
                                   count, 1000, scale);
        device::emulate_accumulate(of_three_warps, pair.reference.data(), dtype, pair.actual.data(),
                                   dtype, count, 1000, scale, nullptr, 3);

        SCOPED_TRACE(testing::Message() << count << " elements, change " << static_cast<int>(change)
                                        << ", scale " << scale << ", seed " << seed);
        EXPECT_EQ(difference(got, want), "");
        EXPECT_EQ(difference(of_three_warps, want), "");
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, DeviceCompareBodyOf, testing::ValuesIn(kDtypes),
                         [](const auto& param_info) {
                           return std::string(name_of(param_info.param));
                         });

TEST(DeviceCompareBody, EveryPairOfDtypesIsAsOnTheCpuWithAndWithoutASelection) {
  constexpr std::int64_t kCount = 4100;
  std::mt19937 generator(7);
  std::vector<std::uint8_t> selected;
  for (std::int64_t i = 0; i < kCount; ++i)
    selected.push_back(static_cast<std::uint8_t>(generator() % 3));
  std::uint32_t seed = 100;
  for (const Dtype r : kDtypes) {
    for (const Dtype a : kDtypes) {
      const Pair of_r = make_pair(r, kCount, Change::kSpecial, ++seed);
      const Pair of_a = make_pair(a, kCount, Change::kSpecial, ++seed);
      for (const std::uint8_t* some : {static_cast<const std::uint8_t*>(nullptr),
                                       static_cast<const std::uint8_t*>(selected.data())}) {
        Stats want;
        Stats got;
        accumulate(want, of_r.reference.data(), r, of_a.actual.data(), a, kCount, 5, 1.0, some);

        device::emulate_accumulate(got, of_r.reference.data(), r, of_a.actual.data(), a, kCount, 5,
                                   1.0, some);

        SCOPED_TRACE(testing::Message() << name_of(r) << " " << name_of(a));
        EXPECT_EQ(difference(got, want), "");
      }
    }
  }
}

// Maxima and positions that several blocks share: the first one's is told, whichever warp has it.
TEST(DeviceCompareBody, TheFirstOfEqualMaximaIsTheWorst) {
  std::vector<float> reference(10'000, 1.0F);
  std::vector<float> actual = reference;
  for (const std::size_t i : {2500, 4700, 9999}) actual[i] = 1.5F;
  Stats got;

  device::emulate_accumulate(got, reinterpret_cast<const std::byte*>(reference.data()),
                             Dtype::kFloat32, reinterpret_cast<const std::byte*>(actual.data()),
                             Dtype::kFloat32, 10'000, 0);

  EXPECT_EQ(got.worst, 2500);
  EXPECT_EQ(got.first_unequal, 2500);
  EXPECT_EQ(got.unequal_values, 3);
}

TEST(DeviceCompareBody, ResultsAddUpAsOnTheCpu) {
  const Pair pair = make_pair(Dtype::kBFloat16, 9000, Change::kFewUlps, 3);
  Stats want;
  Stats got;
  for (const std::int64_t begin : {0, 5000}) {
    const std::int64_t count = begin == 0 ? 5000 : 4000;
    accumulate(want, pair.reference.data() + 2 * begin, Dtype::kBFloat16,
               pair.actual.data() + 2 * begin, Dtype::kBFloat16, count, begin);
    device::emulate_accumulate(got, pair.reference.data() + 2 * begin, Dtype::kBFloat16,
                               pair.actual.data() + 2 * begin, Dtype::kBFloat16, count, begin);
  }

  EXPECT_EQ(got.numel, 9000);
  EXPECT_EQ(difference(got, want), "");
}

TEST(DeviceDigestBody, EveryLengthAndSeedGivesTheDigestOfTheCpu) {
  std::mt19937 generator(11);
  Bytes bytes(70'000);
  for (std::byte& b : bytes) b = static_cast<std::byte>(generator());
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 2200; ++n) lengths.push_back(n);
  for (const std::size_t blocks : {3, 8, 16, 64}) {
    for (const std::size_t n : {blocks * 1024 - 1, blocks * 1024, blocks * 1024 + 1,
                                blocks * 1024 + 63, blocks * 1024 + 64, blocks * 1024 + 65})
      lengths.push_back(n);
  }
  lengths.push_back(bytes.size());

  for (const std::size_t n : lengths) {
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0} / 3}) {
      ASSERT_EQ(device::emulate_digest(bytes.data(), n, seed), digest_of(bytes.data(), n, seed))
          << n << " bytes, seed " << seed;
    }
  }
}

TEST(DeviceDigestBody, OneBitAnywhereChangesIt) {
  Bytes bytes(5000);
  const std::uint64_t whole = device::emulate_digest(bytes.data(), bytes.size());
  for (const std::size_t i : {0, 1023, 1024, 2500, 4095, 4096, 4935, 4936, 4999}) {
    bytes[i] ^= std::byte{4};
    EXPECT_NE(device::emulate_digest(bytes.data(), bytes.size()), whole) << i;
    bytes[i] ^= std::byte{4};
  }
}

TEST(DeviceStatsBuild, WithoutCudaTheClassSaysThatItIsNotBuilt) {
  if (has_device_stats()) return;  // tests of label gpu have it
  EXPECT_THROW(DeviceStats(nullptr), NotBuiltError);
}

}  // namespace
}  // namespace isoshard
