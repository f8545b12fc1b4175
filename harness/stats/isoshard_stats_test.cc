// SPDX-License-Identifier: Apache-2.0
// The C interface gives the judge's own numbers, bit by bit, for every pair of dtypes.
#include "harness/stats/isoshard_stats.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "core/base/sha256.h"
#include "harness/stats/stats.h"

namespace isoshard {
namespace {

constexpr std::int64_t kCount = 1003;

/// Any bits, but bool bytes are 0 or 1.
std::vector<std::byte> bytes_of(int dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(kCount * isoshard_stats_size_of(dtype));
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>(dtype == ISOSHARD_BOOL ? random() % 2 : random() % 256);
  return bytes;
}

TEST(StatsInC, EveryNumberIsThatOfTheJudge) {
  std::vector<std::uint8_t> selected(kCount, 1);
  for (std::size_t i = 0; i < selected.size(); i += 7) selected[i] = 0;
  for (int reference = ISOSHARD_FLOAT64; reference <= ISOSHARD_BOOL; ++reference) {
    for (int actual = ISOSHARD_FLOAT64; actual <= ISOSHARD_BOOL; ++actual) {
      const std::vector<std::byte> a = bytes_of(reference, 1), b = bytes_of(actual, 2);
      Stats stats;
      accumulate(stats, a.data(), static_cast<Dtype>(reference), b.data(),
                 static_cast<Dtype>(actual), kCount, 5, 0.5, selected.data());
      isoshard_stats in_c;
      ASSERT_EQ(isoshard_stats_init(&in_c), ISOSHARD_STATS_OK);
      ASSERT_EQ(isoshard_stats_accumulate(&in_c, a.data(), reference, b.data(), actual, kCount, 5,
                                          0.5, selected.data()),
                ISOSHARD_STATS_OK);

      // Both hold the same eight-byte numbers in the same order; Stats has one more at its end.
      static_assert(offsetof(Stats, sum_diff) == sizeof(isoshard_stats));
      EXPECT_EQ(std::memcmp(&stats, &in_c, sizeof in_c), 0) << reference << " and " << actual;
      EXPECT_EQ(stats.numel, in_c.numel);
      EXPECT_EQ(stats.worst, in_c.worst);
      const double error = isoshard_stats_relative_error(&in_c), own = stats.relative_error();
      EXPECT_EQ(std::memcmp(&error, &own, sizeof own), 0);
    }
  }
}

TEST(StatsInC, DigestsAreThoseOfTheJudge) {
  const std::vector<std::byte> bytes = bytes_of(ISOSHARD_FLOAT32, 3);
  std::uint64_t digest = 0;
  char hex[65];

  ASSERT_EQ(isoshard_stats_xxh3(bytes.data(), bytes.size(), 9, &digest), ISOSHARD_STATS_OK);
  ASSERT_EQ(isoshard_stats_sha256(bytes.data(), bytes.size(), hex), ISOSHARD_STATS_OK);

  EXPECT_EQ(digest, digest_of(bytes.data(), bytes.size(), 9));
  EXPECT_EQ(hex, sha256_hex(bytes));
}

}  // namespace
}  // namespace isoshard
