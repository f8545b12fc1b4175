// SPDX-License-Identifier: Apache-2.0
// Bit equality can fail: numerics that say one thing wrong diverge at the first tensor they touch.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "harness/judge/judge.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

struct WrongNumerics {
  std::string name;
  Case item;
  std::function<void(NumericsSpec&)> change;
  Stage first_stage;
  std::string first_name;  // of the first wrong tensor; empty: any of the stage
};
void PrintTo(const WrongNumerics& wrong, std::ostream* out) {
  *out << wrong.name;
}

std::vector<std::string> all_of(const std::vector<std::vector<std::string>>& buckets) {
  std::vector<std::string> names;
  for (const std::vector<std::string>& bucket : buckets)
    names.insert(names.end(), bucket.begin(), bucket.end());
  return names;
}

std::vector<WrongNumerics> wrong_vocabularies() {
  const std::string loss = "loss_per_dp_rank";
  const Case fp32 = split(with_vocabulary(step_case("autotp", {.tp = 3}), 97), 8),
             smoothed_labels = smoothed(fp32);
  // Most changes in the last bit of a sum are lost in its logarithm: many tokens, so that one is
  // kept on any CPU.
  const Case many_tokens = with(fp32, [](Case& c) { c.batch_size = 16; });
  return {
      {"vocab_embedding_average", fp32,
       [](NumericsSpec& a) { a.vocabulary->embedding_output.reduction = Reduction::kAvg; },
       Stage::kForward, "model.embed_tokens"},
      {"vocab_embedding_dtype", fp32,
       [](NumericsSpec& a) { a.vocabulary->embedding_output.dtype = Dtype::kBFloat16; },
       Stage::kForward, "model.embed_tokens"},
      {"vocab_head_order", fp32,
       [](NumericsSpec& a) {
         a.vocabulary->head_input_gradient.addends = {2, 1, 0};
       },
       Stage::kActivationGrad, "model.norm"},
      {"vocab_exponentials_order", many_tokens,
       [](NumericsSpec& a) {
         a.vocabulary->sum_of_exponentials.addends = {2, 1, 0};
       },
       Stage::kForward, loss},
      {"vocab_exponentials_dtype", fp32,
       [](NumericsSpec& a) { a.vocabulary->sum_of_exponentials.dtype = Dtype::kBFloat16; },
       Stage::kForward, loss},
      {"vocab_target_average", fp32,
       [](NumericsSpec& a) { a.vocabulary->target_logit.reduction = Reduction::kAvg; },
       Stage::kForward, loss},
      {"vocab_smoothing_dtype", smoothed_labels,
       [](NumericsSpec& a) { a.vocabulary->sum_of_logits.dtype = Dtype::kBFloat16; },
       Stage::kForward, loss},
      {"vocab_own_maximum", fp32,
       [](NumericsSpec& a) { a.vocabulary->largest_logit.is_made = false; }, Stage::kForward, loss},
      {"vocab_loss_dtype", fp32,
       [](NumericsSpec& a) { a.vocabulary->loss_dtype = Dtype::kFloat64; }, Stage::kForward, loss},
      {"vocab_maximum_dtype", fp32,
       [](NumericsSpec& a) { a.vocabulary->largest_logit.dtype = Dtype::kBFloat16; },
       Stage::kForward, loss},
  };
}

std::vector<WrongNumerics> wrong_products() {
  const auto in_bf16 = [](Case item) {
    item.settings.autocast = Dtype::kBFloat16;
    return item;
  };
  const Case qwen = in_bf16(step_case("autotp", {.tp = 3})),
             biased =
                 in_bf16(with_biases(step_case("autotp", {.tp = 3}, Dtype::kFloat32, "llama")));
  const std::string first = "model.layers.0.self_attn.q_proj",
                    first_row = "model.layers.0.self_attn.o_proj";
  return {
      {"autocast_none", qwen, [](NumericsSpec& a) { a.precision.products.reset(); },
       Stage::kForward, first},
      {"autocast_dtype", qwen,
       [](NumericsSpec& a) { a.precision.products->dtype = Dtype::kFloat16; }, Stage::kForward,
       first},
      {"autocast_row_bias", biased,
       [](NumericsSpec& a) { a.precision.products->rounds_row_bias = false; }, Stage::kForward,
       first_row},
      {"autocast_row_rounding", qwen,
       [](NumericsSpec& a) { a.tensor.row_output.rounds_every_add = true; }, Stage::kForward,
       first_row},
      {"autocast_column_dtype", qwen,
       [](NumericsSpec& a) { a.tensor.column_input_gradient.dtype = Dtype::kBFloat16; },
       Stage::kActivationGrad, "model.layers.1.post_attention_layernorm"},
  };
}

std::vector<WrongNumerics> wrong_specs() {
  const Case fp32 = step_case("autotp", {.dp = 2, .tp = 3}),
             bf16 = step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kBFloat16);
  const Case dp = step_case("ddp", {.dp = 3}),
             dp_bf16 = step_case("ddp", {.dp = 3}, Dtype::kBFloat16);
  const std::string first_row = "model.layers.0.self_attn.o_proj",
                    last_column_input = "model.layers.1.post_attention_layernorm";
  const Case copies = copied_heads_case({.dp = 2, .tp = 3}, 6, 1);
  // Half of all changes in the last bit of a sum of squares are lost in its root: several steps, so
  // that one is kept on any CPU.
  Case norm = dp;
  norm.seed = 1;
  norm.steps = 8;
  Case ring = step_case("ddp", {.dp = 3});
  ring.reduction_order = ReductionOrder::kRing;
  ring.settings.bucket_bytes = 4096;
  std::vector<WrongNumerics> specs = {
      {"row_order", fp32,
       [](NumericsSpec& a) {
         a.tensor.row_output.addends = {2, 1, 0};
       },
       Stage::kForward, first_row},
      {"row_rounding", bf16, [](NumericsSpec& a) { a.tensor.row_output.rounds_every_add = true; },
       Stage::kForward, first_row},
      {"row_dtype", fp32, [](NumericsSpec& a) { a.tensor.row_output.dtype = Dtype::kBFloat16; },
       Stage::kForward, first_row},
      {"row_average", fp32,
       [](NumericsSpec& a) { a.tensor.row_output.reduction = Reduction::kAvg; }, Stage::kForward,
       first_row},
      {"column_order", fp32,
       [](NumericsSpec& a) {
         a.tensor.column_input_gradient.addends = {2, 1, 0};
       },
       Stage::kActivationGrad, last_column_input},
      {"column_dtype", fp32,
       [](NumericsSpec& a) { a.tensor.column_input_gradient.dtype = Dtype::kBFloat16; },
       Stage::kActivationGrad, last_column_input},
      {"column_together", fp32,
       [](NumericsSpec& a) {
         for (SharedInput& shared : a.tensor.shared_inputs) shared.reduced_together = true;
       },
       Stage::kActivationGrad, last_column_input},
      {"tied_adds", bf16,
       [](NumericsSpec& a) {
         for (SharedInput& shared : a.tensor.shared_inputs)
           std::reverse(shared.adds.begin(), shared.adds.end());
       },
       Stage::kActivationGrad, "model.layers.1.input_layernorm"},
      {"gradient_order", dp,
       [](NumericsSpec& a) {
         a.data.parameter_gradient.addends = {2, 1, 0};
       },
       Stage::kParameterGrad, ""},
      {"gradient_rounding", dp_bf16,
       [](NumericsSpec& a) { a.data.parameter_gradient.rounds_every_add = true; },
       Stage::kParameterGrad, ""},
      {"gradient_dtype", dp,
       [](NumericsSpec& a) { a.data.parameter_gradient.dtype = Dtype::kBFloat16; },
       Stage::kParameterGrad, ""},
      {"copied_heads_not_summed", copies,
       [](NumericsSpec& a) { a.tensor.holder_gradient.reduction = Reduction::kAvg; },
       Stage::kParameterGrad, "model.layers.0.self_attn.k_proj.weight"},
      {"copied_heads_order", copies,
       [](NumericsSpec& a) {
         a.tensor.holder_gradient.addends = {2, 1, 0};
       },
       Stage::kParameterGrad, "model.layers.0.self_attn.k_proj.weight"},
      {"bucket_in_a_ring", ring,
       [](NumericsSpec& a) {
         a.data.buckets.parameters.assign(1, all_of(a.data.buckets.parameters));
       },
       Stage::kParameterGrad, ""},
      {"norm_order", norm, [](NumericsSpec& a) { a.norm.adds = NormAdds::kReverseModelOrder; },
       Stage::kGradNorm, "grad_norm"},
      {"norm_dtype", fp32, [](NumericsSpec& a) { a.norm.square_sums.dtype = Dtype::kFloat32; },
       Stage::kGradNorm, "grad_norm"},
      {"loss_dtype", dp, [](NumericsSpec& a) { a.data.loss.dtype = Dtype::kFloat32; },
       Stage::kForward, "loss"},
  };
  for (const std::vector<WrongNumerics>& more : {wrong_vocabularies(), wrong_products()}) {
    specs.insert(specs.end(), more.begin(), more.end());
  }
  return specs;
}

class EmulatedControls : public ::testing::TestWithParam<WrongNumerics> {};

TEST_P(EmulatedControls, AWrongSpecIsNotBitEqual) {
  const WrongNumerics& wrong = GetParam();
  NumericsSpec numerics = numerics_of(wrong.item);
  wrong.change(numerics);
  const Reference reference = make_emulated_reference(wrong.item, numerics);

  const Trace actual = run_case(wrong.item, reference);
  const Verdict verdict = judge(reference, actual, exact_policy_of(wrong.item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  ASSERT_FALSE(verdict.findings.empty());
  const Finding& first = verdict.findings.front();
  EXPECT_EQ(name_of(first.stage), name_of(wrong.first_stage)) << first.what;
  EXPECT_TRUE(wrong.first_name.empty() || first.key.name == wrong.first_name) << first.what;
}

INSTANTIATE_TEST_SUITE_P(Specs, EmulatedControls, ::testing::ValuesIn(wrong_specs()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace isoshard
