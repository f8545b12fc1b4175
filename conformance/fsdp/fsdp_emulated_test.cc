// SPDX-License-Identifier: Apache-2.0
// Steps of fsdp_tp are, bit by bit, what its declared arithmetic says - with no tolerance anywhere.
#include <gtest/gtest.h>

#include <vector>

#include "core/observe/layer_name.h"
#include "harness/judge/judge.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "suite/testing/emulated_cases.h"
#include "suite/testing/fsdp_cases.h"

namespace isoshard {
namespace {

class EmulatedFsdp : public ::testing::TestWithParam<Case> {};
class EmulatedFsdpWide : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedFsdp, IsBitEqualToTheSubject) {
  expect_bit_equal_to_the_subject(GetParam());
}

TEST_P(EmulatedFsdpWide, IsBitEqualToTheSubject) {
  expect_bit_equal_to_the_subject(GetParam());
}

TEST(FsdpNumerics, SaysWhatLogitsAreRoundedTo) {
  const Case item = with_output(fsdp_case({.dp = 3, .tp = 2}), Dtype::kBFloat16);
  NumericsSpec unrounded = numerics_of(item);
  unrounded.precision.logits_dtype.reset();
  const Reference reference = make_emulated_reference(item, unrounded);

  const Verdict verdict = judge(reference, run_case(item, reference), exact_policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().key.name, "loss_per_dp_rank");
}

TEST(FsdpNumerics, ReducesTheGradientsOfABlockInOneCall) {
  const Case item = fsdp_case({.dp = 3, .tp = 2});

  const NumericsSpec numerics = numerics_of(item);

  // The layers, and what is in none of them.
  ASSERT_EQ(numerics.data.buckets.parameters.size(),
            static_cast<std::size_t>(item.config.num_layers) + 1);
  for (const std::vector<std::string>& names : numerics.data.buckets.parameters) {
    EXPECT_GT(names.size(), 1U);
    for (const std::string& name : names) EXPECT_EQ(layer_of(name), layer_of(names.front()));
  }
}

// The loss widens logits anyway.
TEST(FsdpNumerics, OfAWiderOutputHasTheSameBits) {
  const Case item = with_masters(fsdp_case({.dp = 3, .tp = 2}));
  const Trace usual = emulate(item, numerics_of(item));

  const Case wide = with_output(item, Dtype::kFloat32);

  EXPECT_EQ(first_difference(usual, emulate(wide, numerics_of(wide))), "");
}

// 48, 96 and 1 rows over 5 ranks; tied heads; norms over heads; copied kv heads; fused weights; a
// cut vocabulary.
std::vector<Case> cases() {
  const Case base = fsdp_case({.dp = 3, .tp = 2});
  return {
      base,
      fsdp_case({.dp = 3}),
      fsdp_case({.dp = 5}),
      fsdp_case({.dp = 3, .tp = 2}, Dtype::kBFloat16),
      with_masters(base),
      with_adamw(with_masters(accumulated(base), Dtype::kFloat32)),
      accumulated(with_adamw(base)),
      in_order(ReductionOrder::kRing, accumulated(fsdp_case({.dp = 3, .tp = 2}, Dtype::kBFloat16))),
      in_order(ReductionOrder::kTree, with_masters(base)),
      with_tied_head(fsdp_case({.dp = 2, .tp = 2})),
      fsdp_case({.dp = 3, .tp = 2}, Dtype::kFloat32, "qwen3"),
      fsdp_case({.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2"),
      with_heads(fsdp_case({.dp = 3, .tp = 2}), 6, 1),
      split(with_vocabulary(base, 97), 8),
      with_output(base, Dtype::kBFloat16),
      with_output(split(with_masters(base), 1), Dtype::kFloat64),
  };
}

std::vector<Case> wide_cases() {
  std::vector<Case> result;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    const Case base = fsdp_case({.dp = 3, .tp = 2}, dtype);
    for (const ReductionOrder order :
         {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree}) {
      result.push_back(in_order(order, with_tied_head(base)));
      result.push_back(in_order(order, with_adamw(accumulated(fsdp_case({.dp = 5}, dtype)))));
    }
    for (const char* const type : {"llama", "qwen3", "gpt2", "megatron_gpt"})
      result.push_back(accumulated(fsdp_case({.dp = 2, .tp = 3}, dtype, type)));
    result.push_back(with_heads(fsdp_case({.dp = 3, .tp = 4}, dtype), 8, 2));
    result.push_back(split(with_vocabulary(with_tied_head(base), 97), 8));
    result.push_back(smoothed(split(with_vocabulary(base, 97), 1)));
    result.push_back(reduced_in(base, Dtype::kFloat32));
    result.push_back(reduced_in(base, Dtype::kBFloat16));
    result.push_back(with(base, [](Case& c) { c.attention = AttentionImpl::kSdpa; }));
  }
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    result.push_back(with_output(accumulated(fsdp_case({.dp = 2, .tp = 3})), dtype));
    result.push_back(
        with_output(smoothed(split(with_masters(fsdp_case({.dp = 3, .tp = 2})), 8)), dtype));
  }
  for (const ReductionOrder order : {ReductionOrder::kRing, ReductionOrder::kTree}) {
    result.push_back(
        in_order(order, accumulated(with_masters(fsdp_case({.dp = 3, .tp = 2}), Dtype::kFloat32))));
    result.push_back(in_order(order, accumulated(with_masters(fsdp_case({.dp = 5})))));
  }
  result.push_back(
      with(fsdp_case({.dp = 3, .tp = 2}), [](Case& c) { c.settings.autocast = Dtype::kBFloat16; }));
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedFsdp, ::testing::ValuesIn(cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Cases, EmulatedFsdpWide, ::testing::ValuesIn(wide_cases()), case_name);

}  // namespace
}  // namespace isoshard
