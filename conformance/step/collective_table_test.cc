// SPDX-License-Identifier: Apache-2.0
// What ranks call in a step is what the subject's table says, and another call is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "harness/judge/own_records.h"
#include "harness/testing/is_cause.h"
#include "harness/trace/collective_calls.h"
#include "subjects/train/loss_normalizer.h"
#include "suite/record/expected_calls.h"
#include "suite/testing/every_subject.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// A run of two steps of which only digests are kept, as `verify` makes it, held to the table.
OwnRecords own_records_of(const Case& item, RunOptions options = {}) {
  const Trace run = run_case(item, Reference(), digests_only(std::move(options)));
  EXPECT_EQ(static_cast<int>(run.ranks.size()), item.world_size());
  return judge_own_records(run, with_collectives(policy_of(item), item));
}

void expect_follows_its_table(Case item) {
  SCOPED_TRACE(item.slug());
  item.steps = 3;  // DDP makes its buckets anew in the second

  const OwnRecords own = own_records_of(item);

  for (const Finding& finding : own.findings) {
    ADD_FAILURE() << finding.what << "; " << finding.evidence;
    break;
  }
  EXPECT_THAT(own.collectives, HasSubstr("were compared with the subject's table"));
  EXPECT_THAT(own.collectives, Not(testing::StartsWith("0 ")));
}

class CollectiveTableOf : public ::testing::TestWithParam<std::string> {
 protected:
  void expect_all(const std::function<void(Case&)>& change,
                  const std::vector<Degrees>& meshes = {{.dp = 2}, {.dp = 3, .tp = 2}}) {
    int tried = 0;
    for (const Degrees& degrees : meshes) {
      Case item = step_case(GetParam(), degrees);
      item.steps = 3;  // a reload needs steps before and after it
      change(item);
      try {
        item.validate();
      } catch (const UsageError&) {
        continue;  // not of this subject
      }
      expect_follows_its_table(item);
      ++tried;
    }
    EXPECT_GT(tried, 0);
  }
};

TEST_P(CollectiveTableOf, HoldsOnEveryMesh) {
  expect_all([](Case&) {}, {{.dp = 2}, {.tp = 2}, {.dp = 2, .tp = 2}, {.dp = 3, .tp = 2}});
}

TEST_P(CollectiveTableOf, HoldsWithMicroBatchesAndRecomputedLayers) {
  expect_all([](Case& item) {
    item.micro_batches = 3;
    item.settings.recompute_every = 1;
    item.settings.loss_mean = LossMean::kLocal;
  });
}

TEST_P(CollectiveTableOf, HoldsIn16BitsWithMastersAndLossScaling) {
  expect_all([](Case& item) {
    item.dtype = Dtype::kFloat16;
    item.settings.master_dtype = Dtype::kFloat32;
    item.settings.loss_scale.kind = LossScaleSettings::Kind::kDynamic;
  });
}

TEST_P(CollectiveTableOf, HoldsUnderAutocastWithSmallBuckets) {
  expect_all([](Case& item) {
    item.settings.autocast = Dtype::kBFloat16;
    item.settings.bucket_bytes = 4096;
  });
}

TEST_P(CollectiveTableOf, HoldsAfterAReload) {
  expect_all([](Case& item) { item.reload_after = 1; });
}

INSTANTIATE_TEST_SUITE_P(Subjects, CollectiveTableOf,
                         ::testing::Values("ddp", "autotp", "fsdp_tp", "megatron", "nd"),
                         [](const auto& subject) { return std::string(subject.param); });

TEST(CollectiveTable, HoldsWhereTheOptimizerIsSharded) {
  for (const int stage : {1, 2}) {
    Case item = step_case("autotp", {.dp = 3, .tp = 2});
    item.settings.zero_stage = stage;
    item.micro_batches = 2;
    item.settings.bucket_bytes = 4096;
    expect_follows_its_table(item);
  }
  Case item = step_case("megatron", {.dp = 3, .tp = 2});
  item.settings.distributed_optimizer = true;
  item.settings.bucket_bytes = 4096;
  expect_follows_its_table(item);
}

TEST(CollectiveTable, HoldsWhereVocabularyAndSequenceAreSplit) {
  Case item = step_case("autotp", {.dp = 2, .tp = 3});
  item.settings.make_vocab_size_divisible_by = 4;
  item.settings.label_smoothing = 0.1;
  expect_follows_its_table(item);
  Case split = step_case("megatron", {.dp = 2, .tp = 2});
  split.settings.sequence_parallel = true;
  split.settings.recompute_every = 1;
  expect_follows_its_table(split);
}

TEST(CollectiveTable, HoldsOnOtherArchitectures) {
  for (const char* const type : {"llama", "qwen3", "gpt2"})
    expect_follows_its_table(step_case("autotp", {.dp = 2, .tp = 2}, Dtype::kFloat32, type));
  expect_follows_its_table(with_heads(step_case("autotp", {.dp = 3, .tp = 2}), 6, 1));
  expect_follows_its_table(with_heads(step_case("fsdp_tp", {.dp = 3, .tp = 2}), 6, 1));
  Case lattice = lattice_case();
  lattice.subject = "autotp";
  lattice.degrees = {.dp = 2, .tp = 2};
  expect_follows_its_table(lattice);
}

/// Asks everybody once more for what is known, and changes no number.
class ChattyNormalizer final : public LossNormalizer {
 public:
  ChattyNormalizer(std::unique_ptr<LossNormalizer> inner, Communicator& dp)
      : inner_(std::move(inner)), dp_(&dp) {}
  std::vector<double> weights(std::span<const std::int64_t> counts) override {
    std::int64_t seen = 1;
    dp_->all_reduce({reinterpret_cast<std::byte*>(&seen), 1, Dtype::kInt64}, Reduction::kSum,
                    {Purpose::kTokenCount, Axis::kDp, {}})
        .wait();
    return inner_->weights(counts);
  }

 private:
  std::unique_ptr<LossNormalizer> inner_;
  Communicator* dp_;
};

TEST(CollectiveTable, NamesACallThatIsMadeTwice) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 2});
  RunOptions options;
  options.edits.parts = [](TrainerParts& parts, Mesh& mesh) {
    parts.loss_normalizer =
        std::make_unique<ChattyNormalizer>(std::move(parts.loss_normalizer), mesh.group(Axis::kDp));
  };
  options.compare = false;
  options.keep = Keep::kEverything;
  const Trace run = run_case(item, Reference(), options);

  const OwnRecords own = judge_own_records(run, with_collectives(policy_of(item), item));

  ASSERT_EQ(own.findings.size(), 4U);
  EXPECT_EQ(own.findings[0].stage, Stage::kCollectives);
  EXPECT_THAT(own.findings[0].what,
              HasSubstr("call 2 of 4 must be all_reduce (loss_reduce, dp, avg) of 8 bytes in fp64, "
                        "got all_reduce (token_count, dp, sum) of 8 bytes in int64"));
}

TEST(CollectiveTable, FindsOtherBytesWithoutKeptBytes) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 2});
  RunOptions options;
  options.edits.parts = [](TrainerParts& parts, Mesh&) { parts.bucket_bytes = 4096; };

  const OwnRecords own = own_records_of(item, options);

  ASSERT_FALSE(own.findings.empty());
  EXPECT_THAT(own.findings[0].what, HasSubstr("call 3 is not the one in the table"));
}

TEST(CollectiveTable, FindsCallsThatNobodyRecorded) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 2});
  Trace run = run_case(item, Reference(), digests_only({}));
  for (RankTrace& rank : run.ranks)
    std::erase_if(rank.records, [](const Record& record) {
      return role_of(record.key) == NameRole::kCollectives;
    });

  const OwnRecords own = judge_own_records(run, with_collectives(policy_of(item), item));

  ASSERT_EQ(own.findings.size(), 8U) << "two axes on four ranks";
  EXPECT_THAT(own.findings[0].what, HasSubstr("were not recorded"));
  EXPECT_THAT(own.findings[0].cause, IsNoCause())
      << "a run that records no calls may make all of them";
}

TEST(CollectiveTable, SaysThatNothingIsExchangedAlongOneAxis) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 2});
  Trace run = run_case(item, Reference(), digests_only({}));
  for (RankTrace& rank : run.ranks) {
    std::erase_if(rank.records, [](const Record& record) {
      return role_of(record.key) == NameRole::kCollectives &&
             axis_of_collectives(record.key) == Axis::kTp;
    });
  }

  const OwnRecords own = judge_own_records(run, with_collectives(policy_of(item), item));

  ASSERT_EQ(own.findings.size(), 4U);
  EXPECT_THAT(own.findings[0].cause, IsCause(CauseId::kNoCallAlongAxis, {{"axis", "tp"}}));
}

// Another dp rank shows the same: what this one read may have been anything.
TEST(CollectiveTable, FindsARankThatDoesNotShowWhatItRead) {
  Case item = step_case("autotp", {.dp = 2, .tp = 2});
  item.steps = 2;
  Trace run = run_case(item, Reference(), digests_only({}));
  std::erase_if(run.ranks.at(1).records,
                [](const Record& record) { return record.key.name.ends_with(".read"); });

  const OwnRecords own = judge_own_records(run, with_collectives(policy_of(item), item));

  ASSERT_FALSE(own.findings.empty());
  EXPECT_THAT(own.findings[0].what, HasSubstr("was not recorded by every rank that steps it"));
  EXPECT_EQ(own.findings[0].ranks, std::vector<int>{1});
}

TEST(CollectiveTable, IsNotAskedForByAPolicyWithoutOne) {
  const Case item = step_case("autotp", {.dp = 2, .tp = 2});
  const Trace run = run_case(item, Reference(), digests_only({}));

  const OwnRecords own = judge_own_records(run, policy_of(item));

  EXPECT_THAT(own.findings, IsEmpty());
  EXPECT_THAT(own.collectives, HasSubstr("not judged"));
}

}  // namespace
}  // namespace isoshard
