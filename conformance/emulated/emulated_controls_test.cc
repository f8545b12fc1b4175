// SPDX-License-Identifier: Apache-2.0
// Bit equality can fail: a record that says one thing wrong diverges at the first tensor it touches.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "conformance/emulated/emulated_cases.h"

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
  for (const std::vector<std::string>& bucket : buckets) names.insert(names.end(), bucket.begin(), bucket.end());
  return names;
}

std::vector<WrongRecord> wrong_records() {
  const Case fp32 = step_case("autotp", 2, 3), bf16 = step_case("autotp", 2, 3, Dtype::kBFloat16);
  const Case dp = step_case("ddp", 3, 1), dp_bf16 = step_case("ddp", 3, 1, Dtype::kBFloat16);
  const std::string first_row = "model.layers.0.self_attn.o_proj", last_column_input = "model.layers.1.post_attention_layernorm";
  const Case copies = copied_heads_case(2, 3, 6, 1);
  // Half of all changes in the last bit of a sum of squares are lost in its root: several steps, so that one is kept on any CPU.
  Case norm = dp;
  norm.seed = 1;
  norm.steps = 8;
  Case ring = step_case("ddp", 3, 1);
  ring.reduction_order = ReductionOrder::kRing;
  ring.settings.bucket_bytes = 4096;
  return {
      {"row_order", fp32,
       [](Arithmetic& a) {
         a.row_output.addends = {2, 1, 0};
       },
       Stage::kForward, first_row},
      {"row_rounding", bf16, [](Arithmetic& a) { a.row_output.rounds_every_add = true; }, Stage::kForward, first_row},
      {"row_dtype", fp32, [](Arithmetic& a) { a.row_output.dtype = Dtype::kBFloat16; }, Stage::kForward, first_row},
      {"row_average", fp32, [](Arithmetic& a) { a.row_output.reduction = Reduction::kAvg; }, Stage::kForward, first_row},
      {"column_order", fp32,
       [](Arithmetic& a) {
         a.column_input_gradient.addends = {2, 1, 0};
       },
       Stage::kActivationGrad, last_column_input},
      {"column_dtype", fp32, [](Arithmetic& a) { a.column_input_gradient.dtype = Dtype::kBFloat16; }, Stage::kActivationGrad,
       last_column_input},
      {"column_together", fp32,
       [](Arithmetic& a) {
         for (SharedInput& shared : a.shared_inputs) shared.reduced_together = true;
       },
       Stage::kActivationGrad, last_column_input},
      {"tied_adds", bf16,
       [](Arithmetic& a) {
         for (SharedInput& shared : a.shared_inputs) std::reverse(shared.adds.begin(), shared.adds.end());
       },
       Stage::kActivationGrad, "model.layers.1.input_layernorm"},
      {"gradient_order", dp,
       [](Arithmetic& a) {
         a.parameter_gradient.addends = {2, 1, 0};
       },
       Stage::kParameterGrad, ""},
      {"gradient_rounding", dp_bf16, [](Arithmetic& a) { a.parameter_gradient.rounds_every_add = true; }, Stage::kParameterGrad, ""},
      {"gradient_dtype", dp, [](Arithmetic& a) { a.parameter_gradient.dtype = Dtype::kBFloat16; }, Stage::kParameterGrad, ""},
      {"copied_heads_not_summed", copies, [](Arithmetic& a) { a.holder_gradient.reduction = Reduction::kAvg; }, Stage::kParameterGrad,
       "model.layers.0.self_attn.k_proj.weight"},
      {"copied_heads_order", copies,
       [](Arithmetic& a) {
         a.holder_gradient.addends = {2, 1, 0};
       },
       Stage::kParameterGrad, "model.layers.0.self_attn.k_proj.weight"},
      {"bucket_in_a_ring", ring, [](Arithmetic& a) { a.gradient_buckets.assign(1, all_of(a.gradient_buckets)); }, Stage::kParameterGrad,
       ""},
      {"norm_order", norm, [](Arithmetic& a) { a.norm_adds = NormAdds::kReverseModelOrder; }, Stage::kGradNorm, "grad_norm"},
      {"norm_dtype", fp32, [](Arithmetic& a) { a.clip_norm.dtype = Dtype::kFloat32; }, Stage::kGradNorm, "grad_norm"},
      {"loss_dtype", dp, [](Arithmetic& a) { a.loss.dtype = Dtype::kFloat32; }, Stage::kForward, "loss"},
  };
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

INSTANTIATE_TEST_SUITE_P(Records, EmulatedControls, ::testing::ValuesIn(wrong_records()), [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace isoshard
