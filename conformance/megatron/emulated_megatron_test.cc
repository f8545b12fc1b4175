// SPDX-License-Identifier: Apache-2.0
// megatron: bit-equal to the emulation of what it declares, which is held to the plain reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/error.h"
#include "harness/testing/run_world.h"
#include "suite/record/batches.h"
#include "suite/record/call_counts.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

Case megatron(const Degrees& degrees, bool sequence, bool distributed,
              Dtype dtype = Dtype::kFloat32, std::string_view model = "qwen2") {
  Case item = step_case("megatron", degrees, dtype, model);
  item.settings.sequence_parallel = sequence;
  item.settings.distributed_optimizer = distributed;
  if (dtype == Dtype::kBFloat16) item.settings.master_dtype = Dtype::kFloat32;
  return item;
}

Case adam(Case item) {
  item.settings.optimizer = OptimizerSettings{};
  item.settings.optimizer.learning_rate = 1e-3;
  item.settings.optimizer.weight_decay = 0.01;
  item.steps = 2;
  return item;
}

Case accumulated(Case item) {
  item.micro_batches = 3;
  item.data.unequal_labels = true;
  item.settings.bucket_bytes = 8192;
  return item;
}

std::vector<Case> exact_cases() {
  constexpr Dtype kBf16 = Dtype::kBFloat16, kFp32 = Dtype::kFloat32;
  std::vector<Case> cases = {
      megatron({.dp = 3, .tp = 2}, false, false),
      megatron({.dp = 3, .tp = 2}, true, false),
      megatron({.dp = 3, .tp = 2}, false, false, kBf16),
      megatron({.dp = 3, .tp = 2}, true, false, kBf16),
      megatron({.dp = 3, .tp = 2}, true, true),
      adam(megatron({.dp = 3, .tp = 2}, true, true, kBf16)),
      adam(accumulated(megatron({.dp = 3, .tp = 2}, false, true))),
      accumulated(megatron({.dp = 3, .tp = 2}, true, true, kBf16)),
      accumulated(megatron({.dp = 2, .tp = 3}, true, false, kBf16)),
      megatron({.tp = 2}, true, true),
      megatron({}, true, true),
      adam(with_heads(megatron({.dp = 2, .tp = 2}, true, true, kBf16), 8, 4)),
      accumulated(with_biases(with_heads(megatron({.dp = 3}, false, true), 6, 2))),
      with(megatron({.dp = 2, .tp = 3}, true, false, Dtype::kFloat64),
           [](Case& c) { c.batch_size = 1; }),
      in_order(ReductionOrder::kRing, megatron({.dp = 3, .tp = 2}, true, true)),
      in_order(ReductionOrder::kTree, megatron({.dp = 2, .tp = 3}, true, false, kBf16)),
      with_tied_head(megatron({.dp = 3, .tp = 2}, true, true)),
      smoothed(split(with_vocabulary(megatron({.dp = 2, .tp = 3}, true, false), 97), 8)),
      with_biases(megatron({.dp = 2, .tp = 3}, true, true, kFp32, "llama")),
      megatron({.dp = 3, .tp = 2}, true, true, kBf16, "qwen3"),
      megatron({.dp = 2, .tp = 3}, true, false, kFp32, "gpt2"),
      megatron({.dp = 3, .tp = 2}, true, true, kBf16, "gpt2"),
      megatron({.dp = 3, .tp = 2}, true, true, kFp32, "megatron_gpt"),
      with_heads(megatron({.tp = 4}, true, false), 8, 2),
      with_heads(megatron({.dp = 2, .tp = 3}, true, true, kFp32, "qwen3"), 6, 1),
      with(megatron({.dp = 2, .tp = 3}, true, false),
           [](Case& c) { c.settings.autocast = Dtype::kBFloat16; }),
  };
  return cases;
}

class EmulatedMegatron : public testing::TestWithParam<Case> {};

TEST_P(EmulatedMegatron, EveryRecordOfEveryRankIsBitEqual) {
  (void)run_bit_equal_to_its_emulation(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedMegatron, testing::ValuesIn(exact_cases()), case_name);

std::vector<Case> plain_cases() {
  std::vector<Case> cases = {
      megatron({.dp = 3, .tp = 2}, true, true),
      megatron({.dp = 2, .tp = 3}, true, false, Dtype::kFloat64),
      accumulated(megatron({.dp = 3, .tp = 2}, true, true, Dtype::kBFloat16)),
      adam(megatron({.dp = 2, .tp = 3}, false, true)),
      megatron({.dp = 3, .tp = 2}, true, false, Dtype::kFloat32, "gpt2"),
      megatron({.dp = 2, .tp = 3}, true, true, Dtype::kFloat32, "megatron_gpt"),
      with_heads(megatron({.tp = 4}, true, true, Dtype::kFloat32, "qwen3"), 8, 2),
  };
  return cases;
}

class MegatronNumerics : public testing::TestWithParam<Case> {};

TEST_P(MegatronNumerics, ConformsToThePlainReference) {
  const Case& item = GetParam();
  const Reference& plain = reference_of(item);

  const Trace emulated = emulate(item, numerics_of(item), {&plain});

  EXPECT_THAT(emulated, conforms_to(plain, policy_of(item)));
}

INSTANTIATE_TEST_SUITE_P(Cases, MegatronNumerics, testing::ValuesIn(plain_cases()), case_name);

// A spec that forgets what only a cut sequence needs gives no reference.
TEST(MegatronControls, ASpecWithoutTheSumsOverTpHasUnequalCopies) {
  const Case item = megatron({.tp = 2}, true, false);
  NumericsSpec wrong = numerics_of(item);
  ASSERT_EQ(wrong.tensor.holder_sums.size(), 1U);
  wrong.tensor.holder_sums.clear();

  EXPECT_THAT([&] { (void)make_emulated_reference(item, wrong); },
              testing::ThrowsMessage<InfrastructureError>(testing::HasSubstr("input_layernorm")));
}

// Gradients of micro-batches in bf16 instead of fp32: the bits must tell.
TEST(MegatronControls, AccumulationInTheParametersDtypeIsNotBitEqual) {
  const Case item = accumulated(megatron({.dp = 3, .tp = 2}, true, false, Dtype::kBFloat16));
  NumericsSpec wrong = numerics_of(item);
  wrong.data.accumulation.dtype = Dtype::kBFloat16;
  const Trace emulated = emulate(item, wrong);

  const Trace actual = run_case(item, reference_of_emulated(emulated));

  EXPECT_THAT(first_difference(emulated, actual), testing::HasSubstr("gradient of"));
}

// Rows in another order are other products (of the same values): the input's gradient adds them in
// that order.
TEST(MegatronControls, ASpecWithOtherTurnsIsNotBitEqual) {
  const Case item = with_heads(megatron({.tp = 2}, false, false), 8, 4);
  NumericsSpec wrong = numerics_of(item);
  int fused = 0;
  for (SharedInput& shared : wrong.tensor.shared_inputs) {
    if (!shared.fused.has_value() || shared.fused->turns == 1) continue;
    ++fused;
    for (std::int64_t& rows : shared.fused->rows) rows *= shared.fused->turns;
    shared.fused->turns = 1;
  }
  ASSERT_EQ(fused, 2);
  const Trace emulated = emulate(item, wrong);

  const Trace actual = run_case(item, reference_of_emulated(emulated));

  EXPECT_NE(first_difference(emulated, actual), "");
}

TEST(MegatronRanks, HoldTheirPartOfTheSequenceAndOfEachBucket) {
  const Case item = megatron({.dp = 2, .tp = 3}, true, true);

  const Trace trace = run_case(item, reference_of(item));

  ASSERT_EQ(trace.ranks.size(), 6U);
  EXPECT_THAT(trace, conforms_to(reference_of(item), policy_of(item)));
  std::int64_t stepped = 0, held = 0;
  for (const Record& record : trace.ranks.front().records) {
    if (record.key.kind == RecordKind::kGrad && role_of(record.key) != NameRole::kClipped)
      stepped += numel_of(record.local_shape);
    if (record.key.kind == RecordKind::kParam && record.key.call == 0)
      held += numel_of(record.local_shape);
  }
  EXPECT_LT(stepped, held * 6 / 10);
  EXPECT_GT(stepped, held * 4 / 10);
  for (int rank = 0; rank < 6; ++rank) {
    for (const char* const point : {"model.embed_tokens", "model.layers.1.input_layernorm",
                                    "model.layers.0.mlp.down_proj", "model.norm"}) {
      EXPECT_EQ(record_of(trace, rank, {0, RecordKind::kActivation, point, 0}).local_shape,
                (Shape{2, 8, 48}))
          << point;
    }
    EXPECT_EQ(record_of(trace, rank, {0, RecordKind::kActivation, "model.layers.0.mlp.up_proj", 0})
                  .local_shape,
              (Shape{2, 24, 32}));
  }
}

std::vector<std::int64_t> calls_of_a_step(const Case& item, Rank& rank) {
  const auto counts = std::make_shared<CallCounts>();
  CountedRank counted(rank, counts);
  const std::unique_ptr<Subject> subject = make_subject(item, counted, nullptr);
  subject->setup();
  subject->train_step(batches_of(item, CaseData(item), rank.rank(), 0));
  return {(*counts)[{CollectiveOp::kAllGather, Purpose::kSequenceGather, Axis::kTp}],
          (*counts)[{CollectiveOp::kReduceScatter, Purpose::kSequenceScatter, Axis::kTp}],
          count_of(*counts, Purpose::kRowParallelForward) +
              count_of(*counts, Purpose::kColumnParallelBackward),
          (*counts)[{CollectiveOp::kAllReduce, Purpose::kGradReduce, Axis::kTp}],
          (*counts)[{CollectiveOp::kAllReduce, Purpose::kGradReduce, Axis::kDp}],
          (*counts)[{CollectiveOp::kReduceScatter, Purpose::kGradReduce, Axis::kDp}],
          (*counts)[{CollectiveOp::kAllGather, Purpose::kParamGather, Axis::kDp}]};
}

TEST(MegatronCollectives, WithACutSequenceGatherAndScatter) {
  const Case item = megatron({.dp = 2, .tp = 3}, true, true);

  const auto calls = run_world(6, [item](Rank& rank) {
    EXPECT_EQ(rank.size(), 6);
    return calls_of_a_step(item, rank);
  });

  // 2 layers of qkv and gate_up, and the head gather; o_proj, down_proj and the embedding scatter;
  // backward the other way round.
  ASSERT_EQ(calls.size(), 6U);
  EXPECT_THAT(calls, testing::Each(testing::ElementsAre(5 + 5, 5 + 5, 0, 1, 0, 1, 1)));
}

TEST(MegatronCollectives, WithoutItAllReduce) {
  const Case item = megatron({.dp = 2, .tp = 3}, false, false);

  const auto calls = run_world(6, [item](Rank& rank) {
    EXPECT_EQ(rank.size(), 6);
    return calls_of_a_step(item, rank);
  });

  EXPECT_THAT(calls, testing::Each(testing::ElementsAre(0, 0, 4 + 4, 0, 1, 0, 0)));
}

TEST(MegatronCases, AreRefusedWithTheNumbers) {
  using testing::HasSubstr;
  using testing::ThrowsMessage;
  Case odd = megatron({.tp = 3}, true, false);
  odd.seq_length = 25;
  Case narrow = megatron({.tp = 2}, false, false, Dtype::kBFloat16);
  narrow.settings.master_dtype.reset();
  Case other = step_case("autotp", {.tp = 2});
  other.settings.sequence_parallel = true;

  EXPECT_THAT([&] { odd.validate(); },
              ThrowsMessage<UsageError>(HasSubstr("sequence length must be divisible by tp 3")));
  EXPECT_THAT([&] { narrow.validate(); },
              ThrowsMessage<UsageError>(HasSubstr("master dtype of megatron must be fp32")));
  EXPECT_THAT([&] { other.validate(); },
              ThrowsMessage<UsageError>(HasSubstr("take one of megatron")));
}

}  // namespace
}  // namespace isoshard
