// SPDX-License-Identifier: Apache-2.0
// Dropout bits: one formula, any cut, any loop, the right rate.
#include "core/random/keep_bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "core/base/philox.h"

namespace isoshard {
namespace {

std::vector<std::uint8_t> kept(std::uint64_t seed, std::string_view name, std::uint64_t first,
                               std::size_t count, double rate) {
  std::vector<std::uint8_t> out(count, 7);
  fill_keep(out, seed, name, first, rate);
  return out;
}

TEST(KeepBits, AreTheWordsOfTheStreamAgainstTheRate) {
  const RandomStream stream(3, "drop");
  const std::vector<std::uint8_t> bits = kept(3, "drop", 0, 5000, 0.1);

  const auto limit = static_cast<std::uint64_t>(0.1 * 4294967296.0);
  for (std::uint64_t i = 0; i < bits.size(); ++i) {
    const std::uint64_t word = stream.pair(i / 4)[i % 4 / 2],
                        half = i % 2 == 0 ? word & 0xFFFFFFFFU : word >> 32;
    ASSERT_EQ(bits[i], half >= limit ? 1 : 0) << i;
  }
}

TEST(KeepBits, AnyCutOfARangeGivesTheSameBits) {
  const std::vector<std::uint8_t> whole = kept(5, "x", 0, 3000, 0.3);
  for (const std::size_t first : {1U, 2U, 3U, 4U, 5U, 255U, 257U, 1023U}) {
    for (const std::size_t count : {0U, 1U, 3U, 256U, 259U, 1500U}) {
      const std::vector<std::uint8_t> part = kept(5, "x", first, count, 0.3);
      EXPECT_TRUE(
          std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(first)))
          << first << " " << count;
    }
  }
}

TEST(KeepBits, EveryLoopOfThisCpuGivesTheSameBits) {
  ASSERT_GE(detail::num_keep_loops(), 1U);
  std::vector<std::uint8_t> first(4099);
  detail::fill_keep_with(0, first, 9, "loop", 2, 0.5);
  for (std::size_t loop = 1; loop < detail::num_keep_loops(); ++loop) {
    std::vector<std::uint8_t> other(4099);
    detail::fill_keep_with(loop, other, 9, "loop", 2, 0.5);
    EXPECT_EQ(first, other) << "loop " << loop;
  }
}

// Binomial: the share of n draws deviates by less than 5 sqrt(p (1 - p) / n) but for once in two
// million.
TEST(KeepBits, AreDroppedAtTheRate) {
  constexpr std::size_t kCount = 1 << 20;
  for (const double rate : {0.0, 0.01, 0.1, 0.5, 0.9}) {
    std::size_t dropped = 0;
    for (const std::uint8_t bit : kept(1, "rate", 0, kCount, rate)) dropped += bit == 0 ? 1U : 0U;
    EXPECT_NEAR(static_cast<double>(dropped) / kCount, rate,
                5 * std::sqrt(rate * (1 - rate) / kCount));
  }
}

TEST(KeepBits, SeedAndNameChangeThem) {
  const std::vector<std::uint8_t> base = kept(1, "a", 0, 512, 0.5);

  EXPECT_NE(base, kept(2, "a", 0, 512, 0.5));
  EXPECT_NE(base, kept(1, "b", 0, 512, 0.5));
}

}  // namespace
}  // namespace isoshard
