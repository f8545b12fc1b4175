// SPDX-License-Identifier: Apache-2.0
/// Claims about what memory holds that nobody has written.
#include "core/memory/unwritten.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

namespace isoshard {
namespace {

template <class T>
T repeated(std::uint16_t word) {
  std::vector<std::uint16_t> words(sizeof(T) / sizeof word, word);
  T value{};
  std::memcpy(&value, words.data(), sizeof value);
  return value;
}

// A sign, `exponent_bits` that are all set, and a mantissa that is not 0.
bool is_nan_of_16_bits(std::uint16_t word, int exponent_bits) {
  const unsigned mantissa = (1U << (15 - exponent_bits)) - 1;
  return (word & 0x7FFFU & ~mantissa) == (0x7FFFU & ~mantissa) && (word & mantissa) != 0;
}

TEST(Unwritten, ItsWordsAreToldFromAllOthers) {
  std::set<std::uint16_t> words;
  for (std::uint64_t run = 0; run < kUnwrittenWords; ++run) words.insert(unwritten_word(run));

  for (unsigned word = 0; word <= 0xFFFF; ++word)
    EXPECT_EQ(is_unwritten_word(static_cast<std::uint16_t>(word)),
              words.contains(static_cast<std::uint16_t>(word)))
        << word;
}

TEST(Unwritten, EveryWordIsNanInEachFloatingPointTypeAndNoUsualInteger) {
  for (std::uint64_t run = 0; run < kUnwrittenWords; ++run) {
    const std::uint16_t word = unwritten_word(run);
    SCOPED_TRACE(word);

    EXPECT_TRUE(is_nan_of_16_bits(word, 8)) << "bf16";
    EXPECT_TRUE(is_nan_of_16_bits(word, 5)) << "fp16";
    EXPECT_TRUE(std::isnan(repeated<float>(word)));
    EXPECT_TRUE(std::isnan(repeated<double>(word)));
    EXPECT_TRUE(repeated<std::int64_t>(word) > 1'000'000 || repeated<std::int64_t>(word) < -9);
    EXPECT_NE(repeated<std::int32_t>(word), 0);
    EXPECT_NE(word & 0xFFU, 0U);
  }
}

TEST(Unwritten, RunsInARowHaveWordsOfTheirOwn) {
  for (const std::uint64_t first : {0U, 1U, 28U, 1000U}) {
    std::set<std::uint16_t> words;
    for (std::uint64_t run = first; run < first + kUnwrittenWords; ++run)
      words.insert(unwritten_word(run));
    EXPECT_EQ(words.size(), kUnwrittenWords);
  }
}

TEST(Unwritten, FillsTheBytesThatItIsGivenAndNoOthers) {
  constexpr std::uint16_t kWord = 0x7FF3;
  constexpr std::byte kBefore{0x55};
  for (std::size_t bytes = 0; bytes < 70; ++bytes) {
    std::vector<std::byte> data(bytes + 2, kBefore);

    fill_unwritten(data.data() + 1, bytes, kWord);

    EXPECT_EQ(data.front(), kBefore);
    EXPECT_EQ(data.back(), kBefore);
    for (std::size_t i = 0; i < bytes; ++i)
      EXPECT_EQ(data[i + 1], i % 2 == 0 ? std::byte{0xF3} : std::byte{0x7F})
          << i << " of " << bytes;
  }
}

}  // namespace
}  // namespace isoshard
