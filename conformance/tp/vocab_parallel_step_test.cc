// SPDX-License-Identifier: Apache-2.0
// Steps with embedding, head and loss split along the vocabulary, against the single process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "fixtures/inputs/inputs.h"
#include "harness/fault/collective_fault.h"
#include "harness/testing/run_world.h"
#include "suite/record/batches.h"
#include "suite/record/call_counts.h"
#include "suite/record/make_subject.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

constexpr Purpose kVocabPurposes[] = {
    Purpose::kVocabParallelEmbed,     Purpose::kVocabParallelMax,
    Purpose::kVocabParallelLogsumexp, Purpose::kVocabParallelTarget,
    Purpose::kVocabParallelSmoothing, Purpose::kVocabParallelBackward};

Case split(Case item, std::int64_t multiple) {
  item.settings.make_vocab_size_divisible_by = multiple;
  return item;
}

Case with_vocabulary(Case item, std::int64_t size) {
  item.config.vocab_size = size;
  item.model_name += "_v" + std::to_string(size);
  return item;
}

Case smoothed(Case item) {
  item.settings.label_smoothing = 0.1;
  item.data.unequal_labels = true;
  return item;
}

// Untied and tied; 96 entries, which 2 and 3 divide, and 97 padded to multiples of tp and of 8 x
// tp; smoothed with unequal counts; a last rank that holds padding only; every architecture;
// micro-batches; batch 1 and an odd length.
std::vector<Case> vocab_parallel_cases() {
  std::vector<Case> cases = {split(step_case("autotp", {.dp = 2}), 1),
                             split(with_vocabulary(step_case("autotp", {}), 97), 8)};
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(split(step_case("autotp", {.tp = 2}, dtype), 1));
    cases.push_back(split(step_case("autotp", {.dp = 3, .tp = 2}, dtype, "llama"), 1));
    cases.push_back(split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, dtype), 97), 8));
    cases.push_back(split(
        with_vocabulary(with_tied_head(step_case("autotp", {.dp = 2, .tp = 3}, dtype)), 97), 1));
    cases.push_back(split(with_heads(step_case("autotp", {.tp = 4}, dtype), 8, 2), 1));
    cases.push_back(
        smoothed(split(with_vocabulary(step_case("autotp", {.dp = 3, .tp = 2}, dtype), 97), 1)));
    cases.push_back(
        split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, dtype, "gpt2"), 97), 1));
    cases.push_back(split(with_vocabulary(step_case("autotp", {.tp = 3}, dtype, "qwen3"), 97), 64));
  }
  for (const char* const model_type : {"qwen2", "gpt2"}) {
    Case item = smoothed(split(
        with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, model_type), 97),
        8));
    item.batch_size = 1;
    item.seq_length = 13;
    item.micro_batches = 3;
    cases.push_back(item);
  }
  // Its head has a name of its own.
  const Case megatron = split(
      with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}, Dtype::kFloat32, "megatron_gpt"), 97),
      8);
  cases.push_back(megatron);
  cases.push_back(with_tied_head(megatron));
  Case adamw =
      split(with_vocabulary(with_tied_head(step_case("autotp", {.dp = 2, .tp = 2})), 97), 8);
  adamw.settings.optimizer = OptimizerSettings{};
  adamw.settings.optimizer.weight_decay = 0.1;
  adamw.steps = 2;
  cases.push_back(adamw);
  return cases;
}

class VocabParallelStep : public ::testing::TestWithParam<Case> {};

TEST_P(VocabParallelStep, MatchesSingleProcess) {
  expect_matches_single_process(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Cases, VocabParallelStep, ::testing::ValuesIn(vocab_parallel_cases()),
                         case_name);

TEST(VocabParallelRanks, HoldTheirPartOfTheVocabulary) {
  const Case item = split(with_vocabulary(step_case("autotp", {.dp = 2, .tp = 3}), 97), 8);

  const Trace trace = run_case(item, reference_of(item));

  ASSERT_EQ(trace.ranks.size(), 6U);
  for (int rank = 0; rank < 6; ++rank) {
    const std::int64_t count = rank % 3 == 2 ? 17 : 40;
    for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) {
      const Record& weight = record_of(trace, rank, {0, RecordKind::kParam, name, 0});
      EXPECT_EQ(weight.local_shape, (Shape{40, 48}));
      EXPECT_EQ(weight.parts.at(0).box.size, (Shape{count, 48}));
    }
    const Record& logits = record_of(trace, rank, {0, RecordKind::kActivation, "lm_head", 0});
    EXPECT_EQ(logits.local_shape, (Shape{2, 24, 40}));
    EXPECT_EQ(logits.layout.global_shape, (Shape{4, 24, 97}));
    EXPECT_EQ(logits.parts.at(0).box.size, (Shape{2, 24, count}));
  }
}

// Each sum is needed: ranks that keep their own part diverge. (A wrong maximum alone is none: it
// cancels. Copies of it that differ are.)
TEST(VocabParallelRanks, ThatSkipACollectiveDiverge) {
  Case item = split(step_case("autotp", {.dp = 3, .tp = 2}), 1);
  item.settings.label_smoothing = 0.1;
  const Reference& reference = reference_of(item);

  for (const Purpose purpose : kVocabPurposes) {
    const auto skipped = skip_segments(
        [purpose](const CallInfo& info, const Segment*) { return info.purpose == purpose; });
    const FaultProbe probe;
    RunOptions options;
    options.decorate = [&](std::unique_ptr<Communicator> inner, int) {
      return decorate_with_fault(std::move(inner), skipped, probe);
    };

    EXPECT_THAT(run_case(item, reference, options),
                ::testing::Not(conforms_to(reference, policy_of(item))))
        << name_of(purpose);
    EXPECT_EQ(probe.count(), 6) << name_of(purpose);
  }
}

TEST(VocabParallelRanks, NeedAutotpAndAPositiveMultiple) {
  using ::testing::HasSubstr;
  using ::testing::ThrowsMessage;
  EXPECT_THAT([] { split(step_case("ddp", {.dp = 2}), 64).validate(); },
              ThrowsMessage<UsageError>(HasSubstr("--vocab-parallel must be left out for ddp")));
  EXPECT_THAT([] { split(step_case("autotp", {.dp = 2, .tp = 2}), -1).validate(); },
              ThrowsMessage<UsageError>(HasSubstr("must be from 1 to 1048576, got -1")));
}

TEST(VocabParallelCollectives, AreOneEachAMicroBatchAndOfTp) {
  Case item = split(step_case("autotp", {.dp = 2, .tp = 3}), 1);
  item.settings.label_smoothing = 0.1;
  item.micro_batches = 2;

  const auto calls = run_world(6, [item](Rank& rank) {
    EXPECT_EQ(rank.size(), 6);
    const auto counts = std::make_shared<CallCounts>();
    CountedRank counted(rank, counts);
    const std::unique_ptr<Subject> subject = make_subject(item, counted, nullptr);
    subject->setup();
    subject->train_step(batches_of(item, CaseData(item), rank.rank(), 0));
    std::vector<std::int64_t> numbers;
    for (const Purpose purpose : kVocabPurposes)
      numbers.push_back((*counts)[{CollectiveOp::kAllReduce, purpose, Axis::kTp}]);
    return numbers;
  });

  ASSERT_EQ(calls.size(), 6U);
  EXPECT_THAT(calls, ::testing::Each(::testing::Each(2)));
}

}  // namespace
}  // namespace isoshard
