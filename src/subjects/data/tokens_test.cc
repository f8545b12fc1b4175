// SPDX-License-Identifier: Apache-2.0
// Token ids: any split sees the same samples; wrong inputs are named.
#include "subjects/data/tokens.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::filesystem::path text_file(const TestFolder& folder, std::string_view text) {
  const std::filesystem::path path = folder.path() / "text.txt";
  write_file_atomically(path, text);
  return path;
}

TEST(TextTokens, IdsAreTheBytesOfConsecutiveSequences) {
  const TestFolder folder;
  const TextTokens tokens(text_file(folder, "abcdefgh"), 128, 4, 0);

  const TokenBatch batch = make_batch(tokens, {0, 1}, 4);

  const bool starts_at_a = batch.input_ids_BS[0][0].item<std::int64_t>() == 'a';
  const at::Tensor expected = at::arange('a', 'i', at::kLong).view({2, 4});
  EXPECT_TRUE(at::equal(batch.input_ids_BS, starts_at_a ? expected : expected.flip(0)));
  EXPECT_TRUE(at::equal(batch.labels_BS, batch.input_ids_BS));
}

TEST(TextTokens, AnySplitGivesTheSameSamples) {
  const TestFolder folder;
  const TextTokens tokens(text_file(folder, "the quick brown fox jumps over the lazy dog"), 128, 5,
                          7);

  const TokenBatch whole = make_batch(tokens, {3, 4, 5, 6, 7, 8}, 5);

  for (std::int64_t part = 0; part < 3; ++part) {
    const TokenBatch batch = make_batch(tokens, {3 + 2 * part, 4 + 2 * part}, 5);
    EXPECT_TRUE(at::equal(batch.input_ids_BS, whole.input_ids_BS.slice(0, 2 * part, 2 * part + 2)))
        << "part " << part;
    EXPECT_EQ(batch.sample_ids.front(), 3 + 2 * part);
  }
}

TEST(RestartPositions, CountsFromZeroAfterEachEndOfADocument) {
  TokenBatch batch;
  batch.input_ids_BS =
      at::tensor({7, 1, 9, 4, 9, 9, 2, 9, 3, 9, 3, 3, 3, 3, 3, 9}, at::kLong).view({2, 8});

  restart_positions(batch, 9);

  const at::Tensor expected =
      at::tensor({0, 1, 2, 0, 1, 0, 0, 1, 0, 1, 0, 1, 2, 3, 4, 5}, at::kLong).view({2, 8});
  EXPECT_TRUE(at::equal(batch.position_ids_BS, expected)) << batch.position_ids_BS;
}

TEST(TextTokens, NamesByteAndVocabularyThatDoNotFit) {
  const TestFolder folder;
  const auto path = text_file(folder, "abz");

  EXPECT_THAT([&] { TextTokens(path, 122, 2, 0); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("122"), HasSubstr("123"))));
  EXPECT_NO_THROW(TextTokens(path, 123, 2, 0));
}

TEST(TextTokens, RefusesATextShorterThanOneSequence) {
  const TestFolder folder;
  const auto path = text_file(folder, "abc");

  EXPECT_THAT([&] { TextTokens(path, 256, 4, 0); },
              ThrowsMessage<FileError>(HasSubstr("sequence of 4 bytes, got 3")));
  EXPECT_THROW(TextTokens(folder.path() / "none.txt", 256, 4, 0), FileError);
}

TEST(RandomTokens, StayBelowTheVocabularyAndReachAllOfIt) {
  const RandomTokens tokens(7, 0);

  const TokenBatch batch = make_batch(tokens, {0, 1, 2, 3}, 100);

  EXPECT_EQ(batch.input_ids_BS.min().item<std::int64_t>(), 0);
  EXPECT_EQ(batch.input_ids_BS.max().item<std::int64_t>(), 6);
}

TEST(RandomTokens, DependOnSeedAndSample) {
  const at::Tensor a = make_batch(RandomTokens(1000, 0), {0, 1}, 16).input_ids_BS;
  const at::Tensor b = make_batch(RandomTokens(1000, 1), {0, 1}, 16).input_ids_BS;

  EXPECT_FALSE(at::equal(a, b));
  EXPECT_FALSE(at::equal(a[0], a[1]));
  EXPECT_TRUE(at::equal(a[1], make_batch(RandomTokens(1000, 0), {1}, 16).input_ids_BS[0]));
}

TEST(UnequalCounts, FollowTheFaultCataloguesNumbers) {
  TokenBatch batch = make_batch(RandomTokens(96, 0), {6, 7, 8, 9, 10, 11}, 24);

  make_counts_unequal(batch, 6);

  const at::Tensor counted = batch.labels_BS.slice(1, 1).ne(-100).sum(1);
  EXPECT_TRUE(at::equal(counted, at::tensor({23, 21, 19, 17, 15, 13}, at::kLong)));
}

TEST(Prompts, AreNotCountedAndGrowWithTheSample) {
  TokenBatch batch = make_batch(RandomTokens(96, 0), {4, 5, 6}, 8);

  hide_prompts(batch, 5, 3);

  const at::Tensor hidden = batch.labels_BS.eq(-100);
  EXPECT_TRUE(at::equal(hidden.sum(1), at::tensor({6, 7, 5}, at::kLong)))
      << "samples 1 and 2 of a global batch, then 0 of the next";
  EXPECT_TRUE(hidden.select(0, 2).slice(0, 0, 5).all().item<bool>());
  hide_prompts(batch, 40, 3);
  EXPECT_TRUE(at::equal(batch.labels_BS.ne(-100).sum(1), at::tensor({1, 1, 1}, at::kLong)))
      << "the last token is always counted";
}

TEST(UnequalCounts, NeverFallBelowOne) {
  EXPECT_EQ(unequal_count(40, 24), 1);
  EXPECT_EQ(unequal_count(5, 2), 1);
}

}  // namespace
}  // namespace isoshard
