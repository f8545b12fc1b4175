// SPDX-License-Identifier: Apache-2.0
// Hugging Face folders: what is found, and what is refused.
#include "subjects/checkpoint/model_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ModelFolder, WithoutConfigOrWithPicklesIsRefused) {
  const TestFolder folder;

  EXPECT_THAT([&] { (void)load_model_folder(folder.path()); },
              ThrowsMessage<FileError>(HasSubstr("no config.json")));
  EXPECT_THAT([&] { (void)load_model_folder(folder / "none"); },
              ThrowsMessage<FileError>(HasSubstr("no such file")));
  write_file_atomically(folder / "config.json",
                        R"({"model_type": "qwen2", "vocab_size": 32, "hidden_size": 16,)"
                        R"( "intermediate_size": 24, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "num_key_value_heads": 2,)"
                        R"( "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
                            "rope_theta": 10000.0, "initializer_range": 0.02,)"
                        R"( "tie_word_embeddings": false, "hidden_act": "silu"})");
  EXPECT_EQ(load_model_folder(folder.path()).weights_path, "");
  EXPECT_EQ(load_model_folder(folder / "config.json").name, folder.path().filename().string());
  write_file_atomically(folder / "pytorch_model.bin", "pickle");
  EXPECT_THAT([&] { (void)load_model_folder(folder / "config.json"); },
              ThrowsMessage<FileError>(
                  AllOf(HasSubstr("pytorch_model.bin"), HasSubstr("model.safetensors"))));
}

}  // namespace
}  // namespace isoshard
