// SPDX-License-Identifier: Apache-2.0
// Steps of nd are, bit by bit, what its declared arithmetic says - with no tolerance anywhere.
#include <gtest/gtest.h>

#include <vector>

#include "core/base/error.h"
#include "harness/judge/judge.h"
#include "subjects/model/zoo/registry.h"
#include "suite/testing/emulated_cases.h"
#include "suite/testing/nd_cases.h"

namespace isoshard {
namespace {

// Stages record in the order of their schedule: the judge takes each record for itself.
void expect_bit_equal(const Case& item) {
  const EmulatedAndActual both = run_beside_its_emulation(item);
  int gradients = 0;
  for (const RankTrace& rank : both.actual.ranks) {
    for (const Record& record : rank.records) gradients += record.key.kind == RecordKind::kGrad;
  }
  EXPECT_GT(gradients, 10 * item.world_size());
}

class EmulatedNd : public ::testing::TestWithParam<Case> {};
class EmulatedNdWide : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedNd, IsBitEqualToTheSubject) {
  expect_bit_equal(GetParam());
}

TEST_P(EmulatedNdWide, IsBitEqualToTheSubject) {
  expect_bit_equal(GetParam());
}

// What a declared arithmetic says of an axis is used: another statement has other bits.
void expect_other_bits(const Case& item, const std::function<void(NumericsSpec&)>& change,
                       std::string_view first) {
  SCOPED_TRACE(first);
  NumericsSpec wrong = numerics_of(item);
  change(wrong);
  const Reference reference = make_emulated_reference(item, wrong);

  const Verdict verdict = judge(reference, run_case(item, reference), exact_policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(describe(verdict.findings.front().key), ::testing::HasSubstr(first));
}

TEST(NdNumerics, SaysInWhichOrderRingBlocksAreMerged) {
  const Case item = in_ring(nd_case({.cp = 3}));
  expect_other_bits(
      item, [](NumericsSpec& n) { n.context.ring->merge_dtype = Dtype::kBFloat16; }, "self_attn");
  expect_other_bits(
      item, [](NumericsSpec& n) { n.context.ring.reset(); }, "self_attn");
}

TEST(NdNumerics, SaysInWhichOrderGradientsOfKeysAreAdded) {
  expect_other_bits(
      nd_case({.cp = 3}),
      [](NumericsSpec& n) {
        n.context.keys_gradient.addends = {2, 0, 1};
      },
      "gradient at");
}

TEST(NdNumerics, SaysWhoAveragesWithWhom) {
  expect_other_bits(
      with_replicas(nd_case({.dp = 4}), 2),
      [](NumericsSpec& n) { n.data.replica_gradient.dtype = Dtype::kBFloat16; }, "gradient of");
}

TEST(NdNumerics, SaysHowMicroBatchesAddUp) {
  expect_other_bits(
      in_pipeline(nd_case({.pp = 2, .dp = 2})),
      [](NumericsSpec& n) { n.data.accumulation.reduces_every_micro_batch = true; }, "gradient of");
}

// Norms are used token by token, and each tp rank has some of the tokens.
TEST(NdNumerics, SaysWhoseGradientsAreSummedWhereTheSequenceIsSplit) {
  const Case item = in_sequence(nd_case({.cp = 2, .tp = 2}));
  NumericsSpec wrong = numerics_of(item);
  ASSERT_EQ(wrong.tensor.holder_sums.size(), 1U);
  wrong.tensor.holder_sums.clear();

  EXPECT_THAT(
      [&] { (void)make_emulated_reference(item, wrong); },
      ::testing::ThrowsMessage<InfrastructureError>(::testing::HasSubstr("input_layernorm")));
}

// Zero bubble, a V, given splits, one embedding on two of more stages.
std::vector<Case> schedule_cases(Dtype dtype) {
  return {in_pipeline(nd_case({.pp = 2, .tp = 2}, dtype), 1, "InterleavedZeroBubble"),
          in_pipeline(nd_case({.pp = 2, .dp = 2, .cp = 2}, dtype), 2, "ZBVZeroBubble"),
          with(in_pipeline(nd_case({.pp = 2}, dtype), 2, "Interleaved1F1B"),
               [](Case& c) { c.settings.nd.stage_placement = "V"; }),
          with(with_layers(in_pipeline(nd_case({.pp = 2}, dtype)), 5),
               [](Case& c) {
                 c.settings.nd.layers_per_stage = {1, 4};
               }),
          in_pipeline(nd_case({.pp = 3, .dp = 2}, dtype, "gpt2"))};
}

// The sequence split over tp: in one stage and several, under cp, with norms of heads, copied kv
// heads, row biases, learned positions and dropout.
std::vector<Case> sequence_cases(Dtype dtype) {
  return {in_sequence(in_pipeline(nd_case({.pp = 2, .cp = 2, .tp = 2}, dtype))),
          in_sequence(in_pipeline(nd_case({.pp = 2, .tp = 2}, dtype, "qwen3"))),
          in_sequence(in_pipeline(with_heads(nd_case({.pp = 2, .tp = 4}, dtype), 4, 2))),
          recomputing_every_second(with(in_sequence(nd_case({.cp = 2, .tp = 2}, dtype, "gpt2")),
                                        [](Case& c) { set_dropout(c.config, 0.1); }))};
}

// Several documents in a sample, in stages that have no token ids, with tables and with a table of
// positions that is learned.
std::vector<Case> packed_cases(Dtype dtype) {
  std::vector<Case> result = {in_pipeline(nd_case({.pp = 2, .cp = 2}, dtype)),
                              in_ring(nd_case({.cp = 3, .tp = 2}, dtype)),
                              nd_case({.dp = 2, .cp = 2}, dtype, "gpt2")};
  for (Case& item : result) item.data.end_of_document = ' ';
  return result;
}

std::vector<Case> emulated_cases() {
  std::vector<Case> result;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    result.push_back(in_pipeline(nd_case({.pp = 2}, dtype)));
    result.push_back(in_pipeline(nd_case({.pp = 2}, dtype), 2, "Interleaved1F1B"));
    result.push_back(nd_case({.cp = 2}, dtype));
    result.push_back(in_ring(nd_case({.cp = 4}, dtype)));
    result.push_back(in_pipeline(nd_case({.pp = 2, .tp = 2}, dtype)));
    result.push_back(nd_case({.dp = 2, .cp = 2, .tp = 2}, dtype));
    result.push_back(with_replicas(nd_case({.dp = 4}, dtype), 2));
  }
  for (const Case& item : schedule_cases(Dtype::kFloat32)) result.push_back(item);
  for (const Case& item : sequence_cases(Dtype::kFloat32)) result.push_back(item);
  for (const Case& item : packed_cases(Dtype::kFloat32)) result.push_back(item);
  result.push_back(in_ring(in_pipeline(nd_case({.pp = 2, .dp = 2, .cp = 2, .tp = 2}))));
  result.push_back(in_pipeline(nd_case({.pp = 2}, Dtype::kFloat32, "gpt2"), 1, "GPipe"));
  result.push_back(with_replicas(nd_case({.dp = 2}), 2));
  return result;
}

// Odd sizes: 5 ranks, 5 layers on 2 stages, cp 3; all orders, dtypes and settings of nd.
std::vector<Case> wide_cases() {
  std::vector<Case> result;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const Case& item : schedule_cases(dtype)) result.push_back(item);
    for (const Case& item : sequence_cases(dtype)) result.push_back(item);
    for (const Case& item : packed_cases(dtype)) result.push_back(item);
    for (const char* const type : {"llama", "megatron_gpt"})
      result.push_back(in_sequence(in_pipeline(nd_case({.pp = 2, .tp = 2}, dtype, type))));
    const Case all = in_pipeline(nd_case({.pp = 2, .dp = 2, .cp = 2, .tp = 2}, dtype));
    result.push_back(all);
    result.push_back(in_ring(all));
    result.push_back(in_sequence(all));
    result.push_back(with_replicas(all, 2));
    for (const ReductionOrder order : {ReductionOrder::kRing, ReductionOrder::kTree}) {
      result.push_back(in_order(order, with_replicas(nd_case({.dp = 4, .cp = 2}, dtype), 2)));
      result.push_back(in_order(order, in_ring(nd_case({.cp = 3, .tp = 2}, dtype))));
      result.push_back(in_order(order, in_pipeline(nd_case({.pp = 2, .dp = 3}, dtype))));
    }
    result.push_back(with_layers(in_pipeline(nd_case({.pp = 2, .tp = 3}, dtype)), 5));
    result.push_back(in_pipeline(nd_case({.pp = 4}, dtype), 2, "Interleaved1F1B"));
    result.push_back(nd_case({.dp = 5}, dtype));
    for (const char* const type : {"llama", "qwen3", "gpt2", "megatron_gpt"})
      result.push_back(in_pipeline(nd_case({.pp = 2, .cp = 2}, dtype, type)));
    result.push_back(with(nd_case({.cp = 2, .tp = 2}, dtype), [](Case& c) {
      c.settings.nd.context_order = ContextOrder::kContiguous;
      c.attention = AttentionImpl::kSdpa;
    }));
    result.push_back(split(with_vocabulary(all, 97), 8));
    result.push_back(with(all, [](Case& c) {
      c.settings.recompute_every = 1;
      c.steps = 2;
    }));
  }
  result.push_back(with(in_ring(nd_case({.cp = 2, .tp = 2}, Dtype::kBFloat16)),
                        [](Case& c) { c.settings.nd.ring_merge_dtype = Dtype::kBFloat16; }));
  const Case half = in_pipeline(nd_case({.pp = 2, .dp = 2, .cp = 2}, Dtype::kBFloat16));
  result.push_back(with(half, [](Case& c) {
    c.settings.master_dtype = Dtype::kFloat32;
    c.settings.reduce_dtype = Dtype::kFloat32;
    c.steps = 2;
  }));
  const Case single = in_pipeline(nd_case({.pp = 2, .dp = 2, .cp = 2}));
  result.push_back(with(single, [](Case& c) { c.settings.autocast = Dtype::kBFloat16; }));
  result.push_back(with(in_ring(single), [](Case& c) {
    c.settings.autocast = Dtype::kFloat16;
    c.settings.loss_scale.kind = LossScaleSettings::Kind::kDynamic;
    c.steps = 3;
  }));
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedNd, ::testing::ValuesIn(emulated_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Cases, EmulatedNdWide, ::testing::ValuesIn(wide_cases()), case_name);

}  // namespace
}  // namespace isoshard
