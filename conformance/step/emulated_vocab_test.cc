// SPDX-License-Identifier: Apache-2.0
// Steps with a vocabulary that is split over tp are, bit by bit, what the subject's declared
// arithmetic says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

// 96 entries, which 2, 3 and 4 divide, and 97 padded to multiples of tp, 8 x tp and 64 x tp (a last
// rank of padding only).
std::vector<Case> vocab_cases(Dtype dtype) {
  std::vector<Case> cases;
  for (const char* type : {"qwen2", "qwen3", "llama", "gpt2", "megatron_gpt"}) {
    cases.push_back(
        split(with_vocabulary(step_case("autotp", {.dp = 3, .tp = 2}, dtype, type), 97), 1));
    cases.push_back(split(
        with_vocabulary(with_tied_head(step_case("autotp", {.dp = 2, .tp = 3}, dtype, type)), 97),
        8));
  }
  cases.push_back(split(step_case("autotp", {.tp = 2}, dtype), 1));
  cases.push_back(split(step_case("autotp", {.dp = 2}, dtype), 8));
  cases.push_back(split(with_vocabulary(step_case("autotp", {.tp = 3}, dtype), 97), 64));
  cases.push_back(split(with_vocabulary(four_head_case({.dp = 3, .tp = 4}, dtype), 33), 16));
  cases.push_back(split(copied_heads_case({.tp = 4}, 8, 2, dtype), 1));
  return cases;
}

std::vector<Case> all_vocab_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    const std::vector<Case> more = vocab_cases(dtype);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat16}) {
    cases.push_back(
        smoothed(split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, dtype), 97), 8)));
  }
  return cases;
}

// What else may change the arithmetic of a split vocabulary.
std::vector<Case> vocab_setting_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    const Case base = split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, dtype), 97), 8);
    cases.push_back(smoothed(base));
    cases.push_back(
        smoothed(split(with_vocabulary(step_case("autotp", {.tp = 4}, dtype, "gpt2"), 97), 1)));
    cases.back().config.num_heads = cases.back().config.num_kv_heads = 4;
    cases.back().config.head_dim = cases.back().config.hidden_size / 4;
    cases.push_back(with(smoothed(with_tied_head(base)), [](Case& c) { c.micro_batches = 2; }));
    cases.push_back(with(base, [](Case& c) { c.settings.loss_mean = LossMean::kLocal; }));
    cases.push_back(with(base, [](Case& c) {
      c.batch_size = 1;
      c.seq_length = 13;
      c.micro_batches = 2;
    }));
    cases.push_back(with(base, [](Case& c) {
      c.settings.optimizer = OptimizerSettings{};
      c.settings.optimizer.weight_decay = 0.1;
      c.steps = 2;
    }));
    cases.push_back(with(base, [](Case& c) {
      c.settings.bucket_bytes = 4096;
      c.model_name += "_small_buckets";
    }));
  }
  return cases;
}

std::vector<Case> vocab_ordered_cases() {
  std::vector<Case> cases;
  for (const ReductionOrder order : {ReductionOrder::kRing, ReductionOrder::kTree}) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      cases.push_back(in_order(
          order,
          smoothed(split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, dtype), 97), 1))));
      cases.push_back(in_order(
          order,
          smoothed(split(
              with_vocabulary(with_tied_head(four_head_case({.dp = 3, .tp = 4}, dtype)), 97), 8))));
    }
  }
  return cases;
}

// A few of each kind; the others are slow tests.
std::vector<Case> vocab_core_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(split(step_case("autotp", {.tp = 2}, dtype), 1));
    cases.push_back(
        split(with_vocabulary(step_case("autotp", {.dp = 3, .tp = 2}, dtype, "llama"), 97), 1));
    cases.push_back(split(
        with_vocabulary(with_tied_head(step_case("autotp", {.dp = 2, .tp = 3}, dtype, "gpt2")), 97),
        8));
    cases.push_back(
        with(smoothed(split(
                 with_vocabulary(with_tied_head(step_case("autotp", {.tp = 3}, dtype)), 97), 64)),
             [](Case& c) { c.micro_batches = 2; }));
    cases.push_back(in_order(
        ReductionOrder::kRing,
        smoothed(split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, dtype, "qwen3"), 97),
                       1))));
    cases.push_back(in_order(ReductionOrder::kTree, split(four_head_case({.tp = 4}, dtype), 8)));
  }
  return cases;
}

class EmulatedVocab : public ::testing::TestWithParam<Case> {};
class EmulatedVocabWide : public EmulatedVocab {};

TEST_P(EmulatedVocab, IsBitEqualToTheSubject) {
  expect_bit_equal_to_the_subject(GetParam());
}

TEST_P(EmulatedVocabWide, IsBitEqualToTheSubject) {
  expect_bit_equal_to_the_subject(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Core, EmulatedVocab, ::testing::ValuesIn(vocab_core_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Models, EmulatedVocabWide, ::testing::ValuesIn(all_vocab_cases()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Orders, EmulatedVocabWide, ::testing::ValuesIn(vocab_ordered_cases()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Settings, EmulatedVocabWide, ::testing::ValuesIn(vocab_setting_cases()),
                         case_name);

// Tokens are independent of each other, so the blocks of the numerics, which a large vocabulary
// fills, change no bit.
TEST(VocabNumerics, OfAnyBlockSizeGivesEqualBits) {
  const Case item = smoothed(split(with_vocabulary(step_case("autotp", {.tp = 3}), 97), 1));
  const Trace whole = emulate(item, numerics_of(item));

  for (const std::int64_t logits : {1, 200}) {
    NumericsSpec blocks = numerics_of(item);
    blocks.vocabulary->logits_per_block = logits;
    EXPECT_EQ(first_difference(whole, emulate(item, blocks)), "") << logits;
  }
}

TEST(VocabNumerics, SaysWhichEntriesARankHasAndHowTheirLossIsAdded) {
  Case item =
      split(with_vocabulary(
                with_tied_head(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kBFloat16)), 97),
            64);

  const NumericsSpec numerics = numerics_of(item);

  ASSERT_TRUE(numerics.vocabulary.has_value());
  EXPECT_EQ(numerics.vocabulary->size, 97);
  EXPECT_EQ(numerics.vocabulary->by_rank, (std::vector<Range>{{0, 64}, {64, 33}, {97, 0}}));
  EXPECT_EQ(numerics.vocabulary->loss_dtype, Dtype::kFloat32);
  EXPECT_EQ(numerics.vocabulary->largest_logit.reduction, Reduction::kMax);
  EXPECT_EQ(numerics.tensor.regions.at("lm_head"), Region::kVocabHead);
  EXPECT_EQ(numerics.tensor.regions.at("model.embed_tokens"), Region::kVocabEmbedding);
  EXPECT_FALSE(numerics.tensor.cuts.contains("lm_head.weight")) << "a tied head has no parameter";
  const ParameterCut& cut = numerics.tensor.cuts.at("model.embed_tokens.weight");
  EXPECT_EQ(cut.by_rank, (std::vector<std::vector<Range>>{{{0, 64}}, {{64, 33}}, {}}));
  EXPECT_EQ(cut.padded_size, 64);
}

// A row of the embedding that its rank keeps to itself.
TEST(VocabNumerics, WithoutTheSumOfTheEmbeddingGivesNoReference) {
  const Case item = split(step_case("autotp", {.tp = 2}), 1);
  NumericsSpec local = numerics_of(item);
  local.vocabulary->embedding_output.is_made = false;

  EXPECT_THAT([&] { (void)make_emulated_reference(item, local); },
              ::testing::ThrowsMessage<InfrastructureError>(
                  ::testing::HasSubstr("different copies of forward at model.embed_tokens")));
}

TEST(VocabNumerics, IsRefusedWhereItContradictsItself) {
  const Case item = split(step_case("autotp", {.tp = 2}), 1);
  NumericsSpec silent = numerics_of(item), wide = silent;
  silent.vocabulary.reset();
  wide.vocabulary->by_rank[0].count = 97;

  EXPECT_THAT([&] { (void)emulate(item, silent); },
              ::testing::ThrowsMessage<InfrastructureError>(
                  ::testing::HasSubstr("does not say how the vocabulary is cut")));
  EXPECT_THAT([&] { (void)emulate(item, wide); },
              ::testing::ThrowsMessage<InfrastructureError>(
                  ::testing::HasSubstr("each of the 96 entries of the vocabulary")));
}

}  // namespace
}  // namespace isoshard
