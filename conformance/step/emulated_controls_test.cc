// SPDX-License-Identifier: Apache-2.0 Bit equality can fail: a record that says one thing wrong
// diverges at the first tensor it touches.
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

struct WrongRecord {
  std::string name;
  Case item;
  std::function<void(Arithmetic&)> change;
  Stage first_stage;
  std::string first_name;  // of the first wrong tensor; empty: any of the stage
};
void PrintTo(const WrongRecord& wrong, std::ostream* out) {
  *out << wrong.name;
}

std::vector<std::string> all_of(const std::vector<std::vector<std::string>>& buckets) {
  std::vector<std::string> names;
  for (const std::vector<std::string>& bucket : buckets)
    names.insert(names.end(), bucket.begin(), bucket.end());
  return names;
}

std::vector<WrongRecord> wrong_vocabularies() {
  const std::string loss = "loss_per_dp_rank";
  const Case fp32 = split(with_vocabulary(step_case("autotp", {.tp = 3}), 97), 8),
             smoothed_labels = smoothed(fp32);
  // Most changes in the last bit of a sum are lost in its logarithm: many tokens, so that one is
  // kept on any CPU.
  const Case many_tokens = with(fp32, [](Case& c) { c.batch_size = 16; });
  return {
      {"vocab_embedding_average", fp32,
       [](Arithmetic& a) { a.vocabulary->embedding_output.reduction = Reduction::kAvg; },
       Stage::kForward, "model.embed_tokens"},
      {"vocab_embedding_dtype", fp32,
       [](Arithmetic& a) { a.vocabulary->embedding_output.dtype = Dtype::kBFloat16; },
       Stage::kForward, "model.embed_tokens"},
      {"vocab_head_order", fp32,
       [](Arithmetic& a) {
         a.vocabulary->head_input_gradient.addends = {2, 1, 0};
       },
       Stage::kActivationGrad, "model.norm"},
      {"vocab_exponentials_order", many_tokens,
       [](Arithmetic& a) {
         a.vocabulary->sum_of_exponentials.addends = {2, 1, 0};
       },
       Stage::kForward, loss},
      {"vocab_exponentials_dtype", fp32,
       [](Arithmetic& a) { a.vocabulary->sum_of_exponentials.dtype = Dtype::kBFloat16; },
       Stage::kForward, loss},
      {"vocab_target_average", fp32,
       [](Arithmetic& a) { a.vocabulary->target_logit.reduction = Reduction::kAvg; },
       Stage::kForward, loss},
      {"vocab_smoothing_dtype", smoothed_labels,
       [](Arithmetic& a) { a.vocabulary->sum_of_logits.dtype = Dtype::kBFloat16; }, Stage::kForward,
       loss},
      {"vocab_own_maximum", fp32,
       [](Arithmetic& a) { a.vocabulary->largest_logit.is_made = false; }, Stage::kForward, loss},
      {"vocab_loss_dtype", fp32, [](Arithmetic& a) { a.vocabulary->loss_dtype = Dtype::kFloat64; },
       Stage::kForward, loss},
      {"vocab_maximum_dtype", fp32,
       [](Arithmetic& a) { a.vocabulary->largest_logit.dtype = Dtype::kBFloat16; }, Stage::kForward,
       loss},
  };
}

std::vector<WrongRecord> wrong_products() {
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
      {"autocast_none", qwen, [](Arithmetic& a) { a.products.reset(); }, Stage::kForward, first},
      {"autocast_dtype", qwen, [](Arithmetic& a) { a.products->dtype = Dtype::kFloat16; },
       Stage::kForward, first},
      {"autocast_row_bias", biased, [](Arithmetic& a) { a.products->rounds_row_bias = false; },
       Stage::kForward, first_row},
      {"autocast_row_rounding", qwen, [](Arithmetic& a) { a.row_output.rounds_every_add = true; },
       Stage::kForward, first_row},
      {"autocast_column_dtype", qwen,
       [](Arithmetic& a) { a.column_input_gradient.dtype = Dtype::kBFloat16; },
       Stage::kActivationGrad, "model.layers.1.post_attention_layernorm"},
  };
}

std::vector<WrongRecord> wrong_records() {
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
  std::vector<WrongRecord> records = {
      {"row_order", fp32,
       [](Arithmetic& a) {
         a.row_output.addends = {2, 1, 0};
       },
       Stage::kForward, first_row},
      {"row_rounding", bf16, [](Arithmetic& a) { a.row_output.rounds_every_add = true; },
       Stage::kForward, first_row},
      {"row_dtype", fp32, [](Arithmetic& a) { a.row_output.dtype = Dtype::kBFloat16; },
       Stage::kForward, first_row},
      {"row_average", fp32, [](Arithmetic& a) { a.row_output.reduction = Reduction::kAvg; },
       Stage::kForward, first_row},
      {"column_order", fp32,
       [](Arithmetic& a) {
         a.column_input_gradient.addends = {2, 1, 0};
       },
       Stage::kActivationGrad, last_column_input},
      {"column_dtype", fp32,
       [](Arithmetic& a) { a.column_input_gradient.dtype = Dtype::kBFloat16; },
       Stage::kActivationGrad, last_column_input},
      {"column_together", fp32,
       [](Arithmetic& a) {
         for (SharedInput& shared : a.shared_inputs) shared.reduced_together = true;
       },
       Stage::kActivationGrad, last_column_input},
      {"tied_adds", bf16,
       [](Arithmetic& a) {
         for (SharedInput& shared : a.shared_inputs)
           std::reverse(shared.adds.begin(), shared.adds.end());
       },
       Stage::kActivationGrad, "model.layers.1.input_layernorm"},
      {"gradient_order", dp,
       [](Arithmetic& a) {
         a.parameter_gradient.addends = {2, 1, 0};
       },
       Stage::kParameterGrad, ""},
      {"gradient_rounding", dp_bf16,
       [](Arithmetic& a) { a.parameter_gradient.rounds_every_add = true; }, Stage::kParameterGrad,
       ""},
      {"gradient_dtype", dp, [](Arithmetic& a) { a.parameter_gradient.dtype = Dtype::kBFloat16; },
       Stage::kParameterGrad, ""},
      {"copied_heads_not_summed", copies,
       [](Arithmetic& a) { a.holder_gradient.reduction = Reduction::kAvg; }, Stage::kParameterGrad,
       "model.layers.0.self_attn.k_proj.weight"},
      {"copied_heads_order", copies,
       [](Arithmetic& a) {
         a.holder_gradient.addends = {2, 1, 0};
       },
       Stage::kParameterGrad, "model.layers.0.self_attn.k_proj.weight"},
      {"bucket_in_a_ring", ring,
       [](Arithmetic& a) { a.gradient_buckets.assign(1, all_of(a.gradient_buckets)); },
       Stage::kParameterGrad, ""},
      {"norm_order", norm, [](Arithmetic& a) { a.norm_adds = NormAdds::kReverseModelOrder; },
       Stage::kGradNorm, "grad_norm"},
      {"norm_dtype", fp32, [](Arithmetic& a) { a.clip_norm.dtype = Dtype::kFloat32; },
       Stage::kGradNorm, "grad_norm"},
      {"loss_dtype", dp, [](Arithmetic& a) { a.loss.dtype = Dtype::kFloat32; }, Stage::kForward,
       "loss"},
  };
  for (const std::vector<WrongRecord>& more : {wrong_vocabularies(), wrong_products()}) {
    records.insert(records.end(), more.begin(), more.end());
  }
  return records;
}

class EmulatedControls : public ::testing::TestWithParam<WrongRecord> {};

TEST_P(EmulatedControls, AWrongRecordIsNotBitEqual) {
  const WrongRecord& wrong = GetParam();
  Arithmetic arithmetic = arithmetic_of(wrong.item);
  wrong.change(arithmetic);
  const Reference reference = make_emulated_reference(wrong.item, arithmetic);

  const Trace actual = run_case(wrong.item, reference);
  const Verdict verdict = judge(reference, actual, exact_options(wrong.item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  ASSERT_FALSE(verdict.findings.empty());
  const Finding& first = verdict.findings.front();
  EXPECT_EQ(name_of(first.stage), name_of(wrong.first_stage)) << first.what;
  EXPECT_TRUE(wrong.first_name.empty() || first.key.name == wrong.first_name) << first.what;
}

INSTANTIATE_TEST_SUITE_P(Records, EmulatedControls, ::testing::ValuesIn(wrong_records()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace isoshard
