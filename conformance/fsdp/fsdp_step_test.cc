// SPDX-License-Identifier: Apache-2.0
// A step of fsdp_tp is the single process's step; what its
// ranks hold, and which collectives they make.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/base/error.h"
#include "fixtures/inputs/inputs.h"
#include "harness/testing/run_world.h"
#include "suite/record/batches.h"
#include "suite/record/call_counts.h"
#include "suite/record/make_subject.h"
#include "suite/testing/fsdp_cases.h"

namespace isoshard {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<Case> step_cases() {
  return {
      fsdp_case({.dp = 2}),
      fsdp_case({.dp = 3}),
      fsdp_case({.dp = 5}),
      fsdp_case({.tp = 2}),
      fsdp_case({.dp = 3, .tp = 2}),
      fsdp_case({.dp = 2, .tp = 3}, Dtype::kFloat64),
      fsdp_case({.dp = 3, .tp = 2}, Dtype::kBFloat16),
      accumulated(with_masters(fsdp_case({.dp = 3, .tp = 2}), Dtype::kFloat32)),
      with_adamw(with_tied_head(fsdp_case({.dp = 2, .tp = 2}))),
      fsdp_case({.dp = 2, .tp = 3}, Dtype::kFloat32, "qwen3"),
      accumulated(fsdp_case({.dp = 3, .tp = 2}, Dtype::kFloat32, "gpt2")),
      fsdp_case({.dp = 2, .tp = 2}, Dtype::kFloat32, "megatron_gpt"),
      with_output(fsdp_case({.dp = 3, .tp = 2}), Dtype::kBFloat16),
      reduced_in(fsdp_case({.dp = 3, .tp = 2}), Dtype::kBFloat16),
      with_output(with_masters(fsdp_case({.dp = 2, .tp = 2})), Dtype::kFloat32),
  };
}

class FsdpStep : public ::testing::TestWithParam<Case> {};

TEST_P(FsdpStep, MatchesSingleProcess) {
  expect_matches_single_process(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Cases, FsdpStep, ::testing::ValuesIn(step_cases()), case_name);

TEST(FsdpRanks, OfAWorldOfOneGiveTheBitsOfTheReference) {
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    const Case item = accumulated(with_tied_head(fsdp_case({}, dtype)));
    const Reference& reference = reference_of(item);

    const Trace trace = run_case(item, reference);

    ASSERT_EQ(trace.ranks.size(), 1U);
    EXPECT_TRUE(is_bit_equal(reference, trace)) << name_of(dtype);
  }
}

TEST(FsdpRanks, KeepTheirRowsOnly) {
  const Case item = fsdp_case({.dp = 3, .tp = 2});

  const Trace trace = run_case(item, reference_of(item));

  ASSERT_EQ(trace.ranks.size(), 6U);
  for (int rank = 0; rank < 6; ++rank) {
    // 96 features of which a tp rank has 48 (up) or all as columns (down); dp ranks share the rows
    // of that.
    EXPECT_EQ(
        record_of(trace, rank, {0, RecordKind::kParam, "model.layers.0.mlp.up_proj.weight", 0})
            .local_shape,
        (Shape{16, 48}));
    EXPECT_EQ(
        record_of(trace, rank, {0, RecordKind::kParam, "model.layers.0.mlp.down_proj.weight", 0})
            .local_shape,
        (Shape{16, 48}));
    EXPECT_EQ(record_of(trace, rank, {0, RecordKind::kGrad, "model.norm.weight", 0}).local_shape,
              (Shape{16}));
  }
}

TEST(FsdpRanks, KeepFewerOrNoRowsAtTheEnd) {
  const Case item = fsdp_case({.dp = 5});

  const Trace trace = run_case(item, reference_of(item));

  std::vector<std::int64_t> rows;
  for (int rank = 0; rank < 5; ++rank) {
    rows.push_back(
        record_of(trace, rank, {0, RecordKind::kParam, "model.norm.weight", 0}).local_shape.at(0));
  }
  EXPECT_THAT(rows, ElementsAre(10, 10, 10, 10, 8));
}

TEST(FsdpRanks, RefuseWhatOtherSubjectsHave) {
  Case staged = fsdp_case({.dp = 2});
  staged.settings.zero_stage = 1;
  Case narrow = with_masters(fsdp_case({.dp = 2}));
  narrow.settings.master_dtype = Dtype::kFloat16;
  narrow.dtype = Dtype::kFloat32;
  Case foreign = step_case("ddp", {.dp = 2});
  foreign.settings.reduce_dtype = Dtype::kBFloat16;
  const Case rounded = with_output(step_case("megatron", {.dp = 2}), Dtype::kBFloat16);

  EXPECT_THAT([&] { staged.validate(); }, ThrowsMessage<UsageError>(HasSubstr("fsdp_tp")));
  EXPECT_THAT([&] { narrow.validate(); }, ThrowsMessage<UsageError>(HasSubstr("at least as wide")));
  EXPECT_THAT([&] { foreign.validate(); },
              ThrowsMessage<UsageError>(HasSubstr("--reduce-dtype must be left out for ddp")));
  EXPECT_THAT([&] { rounded.validate(); },
              ThrowsMessage<UsageError>(HasSubstr("--output-dtype must be left out for megatron")));
}

std::vector<std::vector<std::int64_t>> calls_of(const Case& item) {
  return run_world(item.world_size(), [item](Rank& rank) {
    const auto counts = std::make_shared<CallCounts>();
    CountedRank counted(rank, counts);
    const std::unique_ptr<Subject> subject = make_subject(item, counted, nullptr);
    subject->setup();
    subject->train_step(batches_of(item, CaseData(item), rank.rank(), 0));
    return std::vector<std::int64_t>{
        (*counts)[{CollectiveOp::kAllGather, Purpose::kParamGather, Axis::kDp}],
        (*counts)[{CollectiveOp::kReduceScatter, Purpose::kGradReduce, Axis::kDp}],
        count_of(*counts, Purpose::kGradReduce),
        count_of(*counts, Purpose::kRowParallelForward),
        count_of(*counts, Purpose::kColumnParallelBackward),
        count_of(*counts, Purpose::kClipNorm),
        count_of(*counts, Purpose::kTokenCount)};
  });
}

// 2 layers: each is gathered for forward and for backward, the root once; each of the three groups
// is reduced once a micro-batch.
TEST(FsdpCollectives, AreTwoGathersALayerAndOneReductionAGroup) {
  const auto calls = calls_of(fsdp_case({.dp = 3, .tp = 2})),
             accumulated_calls = calls_of([] {
               Case item = fsdp_case({.dp = 3, .tp = 2});
               item.micro_batches = 2;
               return item;
             }());

  ASSERT_EQ(calls.size(), 6U);
  EXPECT_THAT(calls, Each(ElementsAre(5, 3, 3, 4, 10, 2, 1)));
  EXPECT_THAT(accumulated_calls, Each(ElementsAre(10, 6, 6, 8, 20, 2, 1)));
}

}  // namespace
}  // namespace isoshard
