// SPDX-License-Identifier: Apache-2.0
// Weights files: what is written is read back box by box; what does not fit is listed in full.
#include "subjects/checkpoint/file_weights.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "core/base/error.h"
#include "core/io/tensor_files.h"
#include "harness/testing/test_folder.h"
#include "subjects/model/config/builtin.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

std::vector<ParameterSpec> two_specs() {
  ParameterSpec matrix;
  matrix.name = "model.a.weight";
  matrix.shape = {4, 6};
  ParameterSpec norm;
  norm.name = "model.norm.weight";
  norm.shape = {6};
  norm.init = ParamInit::kOnes;
  return {matrix, norm};
}

TEST(FileWeights, BoxesAreSlicesOfWhatWasSaved) {
  const TestFolder folder;
  const std::vector<ParameterSpec> specs = two_specs();
  const InitialWeights source(3, 0.02, true);
  save_weights(folder / "model.safetensors", specs, source, Dtype::kFloat32);

  const FileWeights weights(folder / "model.safetensors", specs);

  const at::Tensor whole = source.read(specs[0], {0, 0}, {4, 6});
  EXPECT_TRUE(at::equal(weights.read(specs[0], {0, 0}, {4, 6}), whole));
  EXPECT_TRUE(
      at::equal(weights.read(specs[0], {1, 2}, {2, 3}), whole.slice(0, 1, 3).slice(1, 2, 5)));
  EXPECT_TRUE(at::equal(weights.read(specs[1], {3}, {3}), source.read(specs[1], {3}, {3})));
  EXPECT_THROW((void)weights.read(specs[0], {3, 0}, {2, 6}), ShapeError);
}

TEST(FileWeights, SavesTheRequestedDtype) {
  const TestFolder folder;
  const std::vector<ParameterSpec> specs = two_specs();
  const InitialWeights source(3, 0.02, true);

  save_weights(folder / "model.safetensors", specs, source, Dtype::kBFloat16);

  const at::Tensor read =
      FileWeights(folder / "model.safetensors", specs).read(specs[0], {0, 0}, {4, 6});
  EXPECT_TRUE(at::equal(read, source.read(specs[0], {0, 0}, {4, 6}).to(at::kBFloat16)));
}

// The format wants a header of whole 8 bytes, padded with fewer than 8 spaces.
TEST(FileWeights, AreAsLargeAsTheyMustBe) {
  const TestFolder folder;
  save_weights(folder / "model.safetensors", two_specs(), InitialWeights(3, 0.02, true),
               Dtype::kFloat32);

  std::ifstream file(folder / "model.safetensors", std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});

  std::uint64_t length = 0;
  ASSERT_GT(bytes.size(), sizeof length);
  std::memcpy(&length, bytes.data(), sizeof length);
  EXPECT_EQ(bytes.size(), sizeof length + length + (4 * 6 + 6) * sizeof(float));
  EXPECT_EQ(length % 8, 0U);
  const std::size_t end = bytes.find_last_of('}', sizeof length + length - 1);
  EXPECT_LT(sizeof length + length - (end + 1), 8U);
}

TEST(FileWeights, ListsEverythingThatDoesNotFit) {
  const TestFolder folder;
  std::vector<ParameterSpec> written = two_specs();
  written[0].shape = {4, 5};
  written[1].name = "model.other.weight";
  save_weights(folder / "model.safetensors", written, InitialWeights(0, 0.02, false),
               Dtype::kFloat32);

  EXPECT_THAT([&] { FileWeights(folder / "model.safetensors", two_specs()); },
              ThrowsMessage<FileError>(
                  AllOf(HasSubstr("model.safetensors"),
                        HasSubstr("model.a.weight is [4, 5] where the model has [4, 6]"),
                        HasSubstr("model.norm.weight is missing"),
                        HasSubstr("model.other.weight is not in the model"))));
}

// As published: no "transformer." before the names, causal masks among the weights.
TEST(FileWeights, ReadsGpt2FoldersOfTheHub) {
  const TestFolder folder;
  const std::vector<ParameterSpec> specs =
      make_model(builtin_config("tiny-gpt2"), AttentionImpl::kEager)->parameters();
  const InitialWeights source(3, 0.02, true);
  std::vector<NamedTensor> tensors;
  for (const ParameterSpec& spec : specs) {
    const std::size_t prefix = std::string_view("transformer.").size();
    tensors.push_back(
        {spec.name.substr(prefix), source.read(spec, Shape(spec.shape.size(), 0), spec.shape)});
  }
  for (const char* const layer : {"h.0", "h.1"}) {
    tensors.push_back({std::string(layer) + ".attn.bias", at::ones({1, 1, 8, 8}).tril()});
    tensors.push_back({std::string(layer) + ".attn.masked_bias", at::full({}, -1e4)});
  }
  write_safetensors(folder / "model.safetensors", tensors);
  tensors.push_back({"h.0.attn.c_attn.mask", at::ones({1})});
  write_safetensors(folder / "extra.safetensors", tensors);

  const FileWeights weights(folder / "model.safetensors", specs);

  for (const ParameterSpec& spec : specs) {
    const Shape zero(spec.shape.size(), 0);
    EXPECT_TRUE(
        at::equal(weights.read(spec, zero, spec.shape), source.read(spec, zero, spec.shape)))
        << spec.name;
  }
  EXPECT_THAT([&] { FileWeights(folder / "extra.safetensors", specs); },
              ThrowsMessage<FileError>(HasSubstr("h.0.attn.c_attn.mask is not in the model")));
}

TEST(FileWeights, RefusesWeightsThatAreNoFloats) {
  const TestFolder folder;
  const std::array<NamedTensor, 2> tensors = {
      NamedTensor{"model.a.weight", at::zeros({4, 6}, at::kInt)},
      NamedTensor{"model.norm.weight", at::zeros({6})}};
  write_safetensors(folder / "model.safetensors", tensors);

  EXPECT_THAT(
      [&] { FileWeights(folder / "model.safetensors", two_specs()); },
      ThrowsMessage<FileError>(AllOf(HasSubstr("model.a.weight must be floating-point, got int32"),
                                     Not(HasSubstr("model.norm.weight")))));
}

}  // namespace
}  // namespace isoshard
