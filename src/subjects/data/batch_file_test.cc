// SPDX-License-Identifier: Apache-2.0
/// Claims about files of batches.
#include "subjects/data/batch_file.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "core/base/error.h"
#include "core/io/tensor_files.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

class BatchFiles : public ::testing::Test {
 protected:
  BatchFiles()
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("isoshard-batch-{}.safetensors", getpid())) {}
  ~BatchFiles() override { std::filesystem::remove(path_); }
  void write(const std::vector<NamedTensor>& tensors) const { write_safetensors(path_, tensors); }
  std::string refusal() const {
    try {
      (void)BatchFile(path_, 50);
    } catch (const FileError& error) {
      return error.what();
    }
    return "not refused";
  }

  std::filesystem::path path_;
};

TEST_F(BatchFiles, GiveBackWhatWasSaved) {
  const RandomTokens source(50, 7);
  std::vector<TokenBatch> batches = {make_batch(source, {9, 4, 6}, 5),
                                     make_batch(source, {1, 0, 3}, 5)};
  hide_prompts(batches[1], 2, 6);

  save_batches(path_, batches);
  const BatchFile file(path_, 50);

  ASSERT_EQ(file.num_samples(), 6);
  ASSERT_EQ(file.seq_length(), 5);
  const TokenBatch one = file.batch({3, 4, 5}), mixed = file.batch({5, 0});
  EXPECT_TRUE(at::equal(one.input_ids_BS, batches[1].input_ids_BS));
  EXPECT_TRUE(at::equal(one.labels_BS, batches[1].labels_BS));
  EXPECT_FALSE(at::equal(one.labels_BS, one.input_ids_BS));
  EXPECT_THAT(one.sample_ids, ElementsAre(1, 0, 3));
  EXPECT_THAT(mixed.sample_ids, ElementsAre(3, 9));
  EXPECT_TRUE(at::equal(mixed.input_ids_BS[1], batches[0].input_ids_BS[0]));
}

TEST_F(BatchFiles, OfIdsAloneHaveThemAsLabels) {
  write({{"input_ids", at::arange(12, at::kInt).reshape({3, 4})},
         {"attention_mask", at::ones({3, 4}, at::kLong)}});

  const TokenBatch batch = BatchFile(path_, 50).batch({2});

  EXPECT_TRUE(at::equal(batch.labels_BS, batch.input_ids_BS));
  EXPECT_EQ(batch.input_ids_BS.scalar_type(), at::kLong);
  EXPECT_THAT(batch.sample_ids, ElementsAre(2));
}

TEST_F(BatchFiles, ThatDoNotFitAreRefusedWithTheNumbers) {
  const at::Tensor ids = at::arange(12, at::kLong).reshape({3, 4});
  at::Tensor wrong = ids.clone();
  wrong[1][2] = 50;
  at::Tensor masked = at::ones_like(ids);
  masked[0][0] = 0;

  write({{"input_ids", wrong}});
  EXPECT_THAT(refusal(),
              HasSubstr("'input_ids' has 50 at [1, 2], outside the model's vocabulary of 50"));
  write({{"input_ids", ids}, {"labels", ids - 1}});
  EXPECT_THAT(refusal(), HasSubstr("'labels' has -1 at [0, 0]"));
  write({{"input_ids", ids}, {"labels", ids.narrow(0, 0, 2).contiguous()}});
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("[3, 4]"), HasSubstr("[2, 4]"), HasSubstr("the shapes must agree")));
  write({{"input_ids", ids}, {"attention_mask", masked}});
  EXPECT_THAT(refusal(), HasSubstr("must not hide tokens"));
  write({{"input_ids", ids.to(at::kFloat)}});
  EXPECT_THAT(refusal(), HasSubstr("must hold integers"));
  write({{"input_ids", ids.flatten()}});
  EXPECT_THAT(refusal(), HasSubstr("'input_ids' must have 2 dimensions, none of them 0, got [12]"));
  write({{"input_ids", ids}, {"position_ids", ids}});
  EXPECT_THAT(refusal(), HasSubstr("unknown tensor 'position_ids'"));
  write({{"labels", ids}});
  EXPECT_THAT(refusal(), HasSubstr("input_ids"));
  std::ofstream(path_) << "1234";
  EXPECT_THAT(refusal(), HasSubstr(path_.filename().string()));
}

TEST_F(BatchFiles, TooSmallForARunAreRefused) {
  write({{"input_ids", at::arange(12, at::kLong).reshape({3, 4})}});
  const BatchFile file(path_, 50);

  EXPECT_NO_THROW(file.require(3, 4));
  EXPECT_THAT([&] { file.require(4, 4); },
              ThrowsMessage<FileError>(HasSubstr("must hold at least 4 samples")));
  EXPECT_THAT([&] { file.require(3, 5); },
              ThrowsMessage<FileError>(HasSubstr("sequences of 5 tokens, got 4")));
}

}  // namespace
}  // namespace isoshard
