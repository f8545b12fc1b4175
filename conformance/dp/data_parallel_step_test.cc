// SPDX-License-Identifier: Apache-2.0
// A data-parallel training step is the single process's step, for every batch shape and loss mean.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "harness/testing/run_world.h"
#include "suite/record/batches.h"
#include "suite/record/call_counts.h"
#include "suite/record/make_subject.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

Case with(Case item, const std::function<void(Case&)>& change) {
  change(item);
  return item;
}

std::vector<Case> step_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    cases.push_back(step_case("ddp", {.dp = 2}, dtype));
    cases.push_back(step_case("ddp", {.dp = 3}, dtype));
  }
  const Case base = step_case("ddp", {.dp = 3});
  cases.push_back(with(base, [](Case& c) { c.data.unequal_labels = true; }));
  cases.push_back(with(base, [](Case& c) { c.settings.loss_mean = LossMean::kLocal; }));
  cases.push_back(with(base, [](Case& c) {
    c.data.unequal_labels = true;
    c.settings.loss_mean = LossMean::kLocal;
  }));
  cases.push_back(with(base, [](Case& c) { c.batch_size = 1; }));
  cases.push_back(with_tied_head(base));
  cases.push_back(with(base, [](Case& c) { c.seq_length = 13; }));
  cases.push_back(with(base, [](Case& c) { c.steps = 3; }));
  cases.push_back(with(base, [](Case& c) { c.attention = AttentionImpl::kSdpa; }));
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const LossMean mean : {LossMean::kGlobal, LossMean::kLocal}) {
      cases.push_back(with(step_case("ddp", {.dp = 3}, dtype), [mean](Case& c) {
        c.micro_batches = 2;
        c.data.unequal_labels = true;
        c.settings.loss_mean = mean;
      }));
    }
  }
  cases.push_back(with(step_case("ddp", {.dp = 2}), [](Case& c) {
    c.micro_batches = 3;
    c.batch_size = 1;
    c.seq_length = 13;
    c.steps = 2;
  }));
  cases.push_back(with(base, [](Case& c) { c.settings.max_grad_norm = 0; }));
  for (const int dp : {1, 5}) {
    cases.push_back(with(step_case("ddp", {.dp = dp}), [](Case& c) {
      c.batch_size = 1;
      c.seq_length = 13;
      c.data.unequal_labels = true;
    }));
  }
  cases.push_back(with(base, [](Case& c) {
    c.settings.optimizer = OptimizerSettings{};
    c.settings.optimizer.weight_decay = 0.1;
    c.steps = 2;
  }));
  return cases;
}

class DataParallelStep : public ::testing::TestWithParam<Case> {};

TEST_P(DataParallelStep, MatchesSingleProcess) {
  expect_matches_single_process(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Cases, DataParallelStep, ::testing::ValuesIn(step_cases()), case_name);

TEST(DataParallelRanks, HoldTheirOwnSamplesAndWholeParameters) {
  const Case item = step_case("ddp", {.dp = 3});
  RunOptions options;
  options.keep = Keep::kEverything;

  const Trace trace = run_case(item, reference_of(item), options);

  for (int rank = 0; rank < 3; ++rank) {
    const Record& ids = record_of(trace, rank, {0, RecordKind::kDataId, "sample_ids", 0});
    EXPECT_EQ(ids.local_shape, (Shape{2}));
    EXPECT_EQ(ids.layout.global_shape, (Shape{6}));
    const at::Tensor own = tensor_of(trace.ranks[static_cast<std::size_t>(rank)].tensor(ids));
    EXPECT_EQ(own[0].item<std::int64_t>(), 2 * rank);
    const Record& weight =
        record_of(trace, rank, {0, RecordKind::kParam, "model.layers.0.mlp.up_proj.weight", 0});
    EXPECT_EQ(weight.local_shape, weight.layout.global_shape);
  }
}

TEST(DataParallelRanks, EndTheStepWithEqualReplicas) {
  const Case item = step_case("ddp", {.dp = 3});

  const Trace trace = run_case(item, reference_of(item));

  std::int64_t compared = 0;
  for (const Record& record : trace.ranks[0].records) {
    if (record.key.kind != RecordKind::kParam && record.key.kind != RecordKind::kGrad) continue;
    for (int rank = 1; rank < 3; ++rank) {
      EXPECT_EQ(record_of(trace, rank, record.key).parts.at(0).digest, record.parts.at(0).digest)
          << describe(record.key);
      ++compared;
    }
  }
  EXPECT_GT(compared, 100);
}

TEST(DataParallelRanks, OfAWorldOfOneGiveTheBitsOfTheReference) {
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    const Case item = step_case("ddp", {}, dtype);
    const Reference& reference = reference_of(item);

    const Trace trace = run_case(item, reference);

    ASSERT_EQ(trace.ranks.size(), 1U);
    EXPECT_TRUE(is_bit_equal(reference, trace)) << name_of(dtype);
  }
}

// The reference runs the same micro-batches as its subjects; this holds it to the step that has
// none.
TEST(GradientAccumulation, IsTheStepOfTheWholeBatch) {
  Case whole = step_case("ddp", {}, Dtype::kFloat64);
  whole.batch_size = 6;
  whole.data.unequal_labels = true;
  Case accumulated = whole;
  accumulated.batch_size = 2;
  accumulated.micro_batches = 3;
  const Reference &expected = reference_of(whole), &actual = reference_of(accumulated);

  std::int64_t compared = 0;
  for (const Record& record : actual.trace().ranks.at(0).records) {
    const RecordKind kind = record.key.kind;
    if (kind != RecordKind::kGrad && kind != RecordKind::kParam && kind != RecordKind::kScalar)
      continue;
    if (stage_of(record.key) == Stage::kProgress || role_of(record.key) == NameRole::kMicroBatch)
      continue;
    const at::Tensor value = tensor_of(actual.trace().assemble(record.key)),
                     reference = tensor_of(expected.trace().assemble(record.key));
    EXPECT_LE((value - reference).norm().item<double>(),
              1e-12 * reference.norm().item<double>() + 1e-15)
        << describe(record.key);
    ++compared;
  }
  EXPECT_GT(compared, 80);
  EXPECT_NE(actual.find({0, RecordKind::kActivationGrad, "lm_head", 2}), nullptr);
  EXPECT_EQ(actual.find({0, RecordKind::kActivationGrad, "lm_head", 3}), nullptr);
}

// A mean of each micro-batch's own mean is another number where counts are unequal.
TEST(GradientAccumulation, IsNotTheMeanOfTheMicroBatchesOwnMeans) {
  Case item = step_case("ddp", {}, Dtype::kFloat64);
  item.batch_size = 1;
  item.micro_batches = 2;
  item.data.unequal_labels = true;
  const auto loss_of = [](const Case& c) {
    return tensor_of(reference_of(c).trace().assemble({0, RecordKind::kScalar, "loss", 0}))
        .item<double>();
  };
  Case own_means = item;
  own_means.degrees.dp = 2;
  own_means.micro_batches = 1;
  own_means.settings.loss_mean = LossMean::kLocal;

  EXPECT_GT(std::abs(loss_of(item) - loss_of(own_means)), 1e-6);
}

// The wrong mean must be seen where counts are unequal, or MatchesSingleProcess would show nothing.
TEST(DataParallelRanks, ThatAverageTheirOwnMeansDivergeFromTheGlobalMean) {
  Case requested = step_case("ddp", {.dp = 2});
  requested.data.unequal_labels = true;
  Case faulty = requested;
  faulty.settings.loss_mean = LossMean::kLocal;
  const Reference& reference = reference_of(requested);

  const Trace trace = run_case(faulty, reference);

  EXPECT_THAT(trace, ::testing::Not(conforms_to(reference, policy_of(requested))));
}

TEST(DataParallelRanks, AreRefusedWithTheNumbersThatDoNotFit) {
  using ::testing::HasSubstr;
  using ::testing::ThrowsMessage;
  const auto run = [](Case item) { (void)run_case(item, Reference()); };

  EXPECT_THAT([&] { run(step_case("ddp", {.dp = 2, .tp = 3})); },
              ThrowsMessage<UsageError>(
                  HasSubstr("tp degree of ddp must be 1, as ddp has no tp axis, got 3")));
  EXPECT_THAT([&] { run(step_case("ddp", {.dp = 17})); },
              ThrowsMessage<UsageError>(
                  HasSubstr("the number of forked ranks must be from 1 to 16, got 17")));
  EXPECT_THAT([&] { run(with(step_case("ddp", {.dp = 2}), [](Case& c) { c.batch_size = 0; })); },
              ThrowsMessage<UsageError>(HasSubstr("batch size must be at least 1, got 0")));
}

TEST(DataParallelCollectives, AreBucketsLossAndTokensOverDpOnly) {
  const auto num_calls = [](LossMean mean, std::int64_t bucket_bytes, int micro_batches) {
    Case item = step_case("ddp", {.dp = 2});
    item.settings.loss_mean = mean;
    item.settings.bucket_bytes = bucket_bytes;
    item.micro_batches = micro_batches;
    return run_world(2, [item](Rank& rank) {
      EXPECT_EQ(rank.size(), 2);
      const auto counts = std::make_shared<CallCounts>();
      const CaseData data(item);
      CountedRank counted(rank, counts);
      const std::unique_ptr<Subject> subject = make_subject(item, counted, nullptr);
      subject->setup();
      subject->train_step(batches_of(item, data, rank.rank(), 0));
      return std::vector<std::int64_t>{count_of(*counts, Purpose::kGradReduce),
                                       count_of(*counts, Purpose::kTokenCount),
                                       count_of(*counts, Purpose::kLossReduce),
                                       count_of(*counts, Purpose::kRowParallelForward),
                                       count_of(*counts, Purpose::kColumnParallelBackward),
                                       count_of(*counts, Purpose::kClipNorm)};
    });
  };
  using ::testing::Each;
  using ::testing::ElementsAre;

  EXPECT_THAT(num_calls(LossMean::kGlobal, 25 << 20, 1), Each(ElementsAre(1, 1, 1, 0, 0, 0)));
  EXPECT_THAT(num_calls(LossMean::kLocal, 25 << 20, 1), Each(ElementsAre(1, 0, 1, 0, 0, 0)));
  EXPECT_THAT(num_calls(LossMean::kGlobal, 1, 1), Each(ElementsAre(27, 1, 1, 0, 0, 0)));
  // Micro-batches add nothing: gradients are reduced after the last one, tokens are counted once
  // for all of them.
  EXPECT_THAT(num_calls(LossMean::kGlobal, 1, 3), Each(ElementsAre(27, 1, 1, 0, 0, 0)));
}

}  // namespace
}  // namespace isoshard
