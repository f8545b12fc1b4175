// SPDX-License-Identifier: Apache-2.0
// Steps of every architecture at sizes and switches that no oracle case has, under ddp and autotp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/judge/judge.h"
#include "suite/testing/emulated_cases.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

struct Sizes {
  const char* slug;
  std::int64_t heads, kv_heads, head_dim, vocabulary, layers;
  bool tied, biases;
};
constexpr Sizes kOneKvHead{"kv1", 6, 1, 6, 97, 1, true, false};
constexpr Sizes kThreeKvHeads{"kv3", 6, 3, 4, 61, 3, false, true};
constexpr Sizes kOddHeads{"h9", 9, 9, 2, 33, 3, true, true};

/// gpt2 has no kv heads of its own, always biases, and hidden = heads x head_dim; megatron_gpt has
/// kv groups in one weight.
Case configured(const char* model_type, const char* subject, const Degrees& degrees,
                const Sizes& sizes, Dtype dtype) {
  Case item = step_case(subject, degrees, dtype, model_type);
  ModelConfig& config = item.config;
  const bool is_gpt2 = config.model_type == "gpt2";
  config.num_heads = sizes.heads;
  config.num_kv_heads = is_gpt2 ? sizes.heads : sizes.kv_heads;
  config.head_dim = sizes.head_dim;
  config.hidden_size = is_gpt2 ? sizes.heads * sizes.head_dim : 20;
  config.intermediate_size = 30;
  config.vocab_size = sizes.vocabulary;
  config.num_layers = sizes.layers;
  config.tie_word_embeddings = sizes.tied;
  if (config.model_type != "qwen2" && !is_gpt2)
    config.qkv_bias = config.attention_out_bias = sizes.biases;
  if (config.model_type == "llama" || config.model_type == "megatron_gpt")
    config.mlp_bias = sizes.biases;
  item.model_name += std::string("_") + sizes.slug;
  item.seq_length = 11;
  return item;
}

bool has_tp(const Case& item) {
  if (item.config.model_type == "megatron_gpt")
    return item.config.num_kv_heads % item.degrees.tp == 0;
  return item.config.num_heads % item.degrees.tp == 0 &&
         (item.config.num_kv_heads % item.degrees.tp == 0 ||
          item.degrees.tp % item.config.num_kv_heads == 0);
}

std::vector<Case> cases(const std::vector<Dtype>& dtypes, const std::vector<Degrees>& meshes) {
  std::vector<Case> result;
  for (const char* const model_type : {"qwen2", "qwen3", "llama", "gpt2", "megatron_gpt"}) {
    for (const Sizes& sizes : {kOneKvHead, kThreeKvHeads, kOddHeads}) {
      for (const Dtype dtype : dtypes) {
        result.push_back(configured(model_type, "ddp", {.dp = 2}, sizes, dtype));
        for (const Degrees& degrees : meshes) {
          const Case item = configured(model_type, "autotp", degrees, sizes, dtype);
          if (has_tp(item)) result.push_back(item);
        }
      }
    }
  }
  return result;
}

class Configurations : public ::testing::TestWithParam<Case> {};
class ConfigurationsWide : public Configurations {};
class ConfigurationsInBf16 : public Configurations {};

void expect_conforming(const Case& item) {
  const Reference& reference = reference_of(item);

  const Trace actual = run_case(item, reference);

  ASSERT_EQ(static_cast<int>(actual.ranks.size()), item.world_size());
  EXPECT_THAT(actual, conforms_to(reference, judge_options(item)));
}

TEST_P(Configurations, MatchSingleProcess) {
  expect_conforming(GetParam());
}
TEST_P(ConfigurationsWide, MatchSingleProcess) {
  expect_conforming(GetParam());
}

// In bf16 some tensors of so small models are rounding noise for the most part, and the verdict
// against the plain reference may be vacuous. It must not be an alarm, and the subject's own
// arithmetic leaves no tolerance.
TEST_P(ConfigurationsInBf16, AreBitEqualToTheirArithmeticAndRaiseNoAlarm) {
  const Case& item = GetParam();
  const Reference& plain = reference_of(item);
  const Reference emulated = make_emulated_reference(item, arithmetic_of(item));

  const Verdict against_plain = judge(plain, run_case(item, plain), judge_options(item));
  const Trace actual = run_case(item, emulated);

  ASSERT_EQ(static_cast<int>(actual.ranks.size()), item.world_size());
  EXPECT_NE(against_plain.status, Status::kDiverges) << against_plain.reason;
  EXPECT_THAT(actual, conforms_to(emulated, exact_options(item)));
}
INSTANTIATE_TEST_SUITE_P(Cases, Configurations,
                         ::testing::ValuesIn(cases({Dtype::kFloat32}, {{.tp = 3}})), case_name);
const std::vector<Degrees> kMeshes = {{.tp = 2}, {.dp = 3, .tp = 2}, {.dp = 2, .tp = 3}, {.tp = 6}};
INSTANTIATE_TEST_SUITE_P(Cases, ConfigurationsWide,
                         ::testing::ValuesIn(cases({Dtype::kFloat64, Dtype::kFloat32}, kMeshes)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Cases, ConfigurationsInBf16,
                         ::testing::ValuesIn(cases({Dtype::kBFloat16}, kMeshes)), case_name);

}  // namespace
}  // namespace isoshard
