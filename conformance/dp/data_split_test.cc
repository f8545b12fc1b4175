// SPDX-License-Identifier: Apache-2.0 The data-split contract in whole runs: exact sample ids on
// every rank of a dp x tp mesh, each once an epoch; a wrong sampler is seen.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "harness/judge/judge.h"
#include "harness/testing/test_folder.h"
#include "subjects/data/sampler.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Ids = std::vector<std::int64_t>;

constexpr std::int64_t kSequences = 13, kLength = 24;

// 13 sequences of 24 ids of the tiny model's vocabulary of 96, as nanoGPT stores them; and 5 ids
// more, which fill no sequence.
class DataSplit : public ::testing::Test {
 protected:
  DataSplit() {
    std::vector<std::uint16_t> ids(kSequences * kLength + 5);
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<std::uint16_t>((i * 29 + i / 24) % 96);
    write_file_atomically(folder_ / "ids.bin",
                          {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof ids[0]});
  }
  [[nodiscard]] Case item(std::string subject, const Degrees& degrees) const {
    Case result = step_case(std::move(subject), degrees);
    result.data.kind = DataSource::Kind::kTokenFile;
    result.data.path = (folder_ / "ids.bin").string();
    result.data.shuffle = true;
    result.data.tail = TailPolicy::kPad;
    return result;
  }

  TestFolder folder_;
};

Ids recorded_ids(const Trace& trace, int rank, int step) {
  const at::Tensor ids = tensor_of(trace.ranks[static_cast<std::size_t>(rank)].tensor(
      record_of(trace, rank, {step, RecordKind::kDataId, "sample_ids", 0})));
  const auto* data = ids.const_data_ptr<std::int64_t>();
  return {data, data + ids.numel()};
}

TEST_F(DataSplit, RanksTakeTheContractsIdsAndTheStepConforms) {
  Case shuffled = item("autotp", {.dp = 3, .tp = 2});
  shuffled.steps = 3;  // 3 global batches of 6 are one epoch of 13 and 5 ids that fill it up
  const Reference& reference = reference_of(shuffled);
  RunOptions options;
  options.keep = Keep::kEverything;

  const Trace trace = run_case(shuffled, reference, options);

  ASSERT_EQ(trace.ranks.size(), 6U);
  EXPECT_THAT(trace, conforms_to(reference, judge_options(shuffled)));
  const EpochSampler sampler(
      {.num_samples = kSequences, .dp_degree = 3, .batch_size = 2, .shuffle = true});
  Ids epoch;
  for (int step = 0; step < 3; ++step) {
    for (int dp = 0; dp < 3; ++dp) {
      const Ids own = recorded_ids(trace, 2 * dp, step);
      EXPECT_EQ(own, sampler.samples(step, dp)) << "step " << step << ", dp rank " << dp;
      EXPECT_EQ(recorded_ids(trace, 2 * dp + 1, step), own) << "the other rank of the tp group";
      epoch.insert(epoch.end(), own.begin(), own.end());
    }
  }
  Ids whole = sampler.order_of(0);
  EXPECT_EQ(Ids(epoch.begin() + kSequences, epoch.end()), Ids(whole.begin(), whole.begin() + 5));
  epoch.resize(kSequences);
  std::sort(epoch.begin(), epoch.end());
  std::iota(whole.begin(), whole.end(), 0);
  EXPECT_EQ(epoch, whole);
}

class SampleOfRankZero final : public Sampler {
 public:
  explicit SampleOfRankZero(std::shared_ptr<const Sampler> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] std::vector<std::int64_t> samples(std::int64_t global_batch,
                                                  int /*dp_coordinate*/) const override {
    return inner_->samples(global_batch, 0);
  }

 private:
  std::shared_ptr<const Sampler> inner_;
};

TEST_F(DataSplit, TheSameSamplesOnEveryDpRankAreSeenInTheIds) {
  const Case three = item("ddp", {.dp = 3});
  const Reference& reference = reference_of(three);
  RunOptions options;
  options.sampler = [](std::shared_ptr<const Sampler> inner, int) {
    return std::make_shared<SampleOfRankZero>(std::move(inner));
  };

  const Trace trace = run_case(three, reference, options);
  const Verdict verdict = judge(reference, trace, judge_options(three));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  ASSERT_FALSE(verdict.findings.empty());
  EXPECT_EQ(verdict.findings.front().stage, Stage::kDataIds);
  EXPECT_EQ(verdict.findings.front().key.name, "sample_ids");
}

TEST_F(DataSplit, TheOrderDoesNotDependOnTheMesh) {
  const CaseData one(item("ddp", {})), three(item("ddp", {.dp = 3}));

  Ids of_one, of_three;
  for (int step = 0; step < 3; ++step) {
    for (const TokenBatch& batch : three.global_batches(step))
      of_three.insert(of_three.end(), batch.sample_ids.begin(), batch.sample_ids.end());
  }
  for (int step = 0; step < 7; ++step) {
    for (const TokenBatch& batch : one.global_batches(step))
      of_one.insert(of_one.end(), batch.sample_ids.begin(), batch.sample_ids.end());
  }

  ASSERT_GE(std::min(of_one.size(), of_three.size()), static_cast<std::size_t>(kSequences));
  EXPECT_EQ(Ids(of_one.begin(), of_one.begin() + kSequences),
            Ids(of_three.begin(), of_three.begin() + kSequences));
}

TEST_F(DataSplit, AFileOfIdsIsReadInOrderAndPaddedUnlessAskedOtherwise) {
  Case plain = item("ddp", {.dp = 5});
  plain.data.shuffle = false;
  plain.data.tail.reset();

  EXPECT_THAT(CaseData(plain).global_batches(0).at(0).sample_ids,
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(CaseData(plain).global_batches(1).at(0).sample_ids,
              ElementsAre(10, 11, 12, 0, 1, 2, 3, 4, 5, 6));
  EXPECT_EQ(CaseData(plain).global_batches(0).at(0).input_ids_BS[1][0].item<std::int64_t>(),
            (24 * 29 + 1) % 96);
}

TEST_F(DataSplit, WhatCannotBeSplitIsRefusedBeforeRanksStart) {
  Case strict = item("ddp", {.dp = 3});
  strict.data.tail = TailPolicy::kError;
  EXPECT_THAT(
      [&] { CaseData{strict}; },
      ThrowsMessage<UsageError>(HasSubstr("13 samples are no multiple of a global batch of 6")));

  Case random = step_case("ddp", {.dp = 2});
  random.data.shuffle = true;
  EXPECT_THAT([&] { CaseData{random}; },
              ThrowsMessage<UsageError>(HasSubstr("random ids have no end")));
}

}  // namespace
}  // namespace isoshard
