// SPDX-License-Identifier: Apache-2.0
// The writer: its files come back bit for bit, aligned, deterministic, and complete or not at all.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/io/tensor_files.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

/// One tensor of every dtype, with odd sizes, a scalar, an empty one and a transposed one.
std::vector<NamedTensor> examples() {
  std::vector<NamedTensor> tensors;
  for (const Dtype dtype :
       {Dtype::kBool, Dtype::kUint8, Dtype::kInt8, Dtype::kInt16, Dtype::kInt32, Dtype::kInt64,
        Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32, Dtype::kFloat64}) {
    tensors.push_back({"t." + std::string(name_of(dtype)),
                       at::arange(15).reshape({3, 5}).to(scalar_type_of(dtype))});
  }
  tensors.push_back({"scalar", at::scalar_tensor(2.5, at::kFloat)});
  tensors.push_back({"empty", at::empty({0, 7}, at::kHalf)});
  tensors.push_back({"transposed", at::arange(6, at::kDouble).reshape({2, 3}).t()});
  tensors.push_back({"strange \"name\" \xc3\xa4", at::ones({1}, at::kFloat).requires_grad_(true)});
  return tensors;
}

TEST(SafetensorsWriter, EveryTensorComesBackBitForBitAndWithoutACopy) {
  const TestFolder folder;
  const std::vector<NamedTensor> tensors = examples();

  write_safetensors(folder / "x.safetensors", tensors, {{"format", "pt"}, {"note", "a \"quote\""}});
  const SafetensorsFile file = SafetensorsFile::open(folder / "x.safetensors");

  ASSERT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("note"), "a \"quote\"");
  for (const NamedTensor& entry : tensors) {
    const at::Tensor back = tensor_of(file.tensor(entry.name));
    EXPECT_EQ(back.scalar_type(), entry.tensor.scalar_type()) << entry.name;
    EXPECT_TRUE(back.equal(entry.tensor)) << entry.name;
    if (back.numel() == 0) continue;
    EXPECT_EQ(back.const_data_ptr(), static_cast<const void*>(file.bytes(entry.name).data()))
        << entry.name << " is misaligned";
  }
}

TEST(SafetensorsWriter, EqualTensorsGiveEqualBytes) {
  const TestFolder folder;

  write_safetensors(folder / "a.safetensors", examples());
  write_safetensors(folder / "b.safetensors", examples());

  EXPECT_EQ(content_of(folder / "a.safetensors"), content_of(folder / "b.safetensors"));
  EXPECT_EQ(folder.num_entries(), 2);
}

TEST(SafetensorsWriter, TheHeaderEndsAtAnEightByteBoundary) {
  const TestFolder folder;
  for (int length = 1; length <= 9; ++length) {
    write_safetensors(folder / "x.safetensors",
                      std::vector<NamedTensor>{
                          {std::string(static_cast<std::size_t>(length), 'n'), at::zeros({1})}});
    const std::string content = content_of(folder / "x.safetensors");

    EXPECT_EQ((content.size() - 4) % 8, 0U) << length;
  }
}

TEST(SafetensorsWriter, AFileWithoutTensorsIsAFile) {
  const TestFolder folder;
  write_safetensors(folder / "x.safetensors", std::vector<NamedTensor>{});

  EXPECT_TRUE(SafetensorsFile::open(folder / "x.safetensors").names().empty());
}

TEST(SafetensorsWriter, ReplacingAFileLeavesOpenViewsAlone) {
  const TestFolder folder;
  write_safetensors(folder / "x.safetensors", std::vector<NamedTensor>{{"w", at::ones({100})}});
  const at::Tensor view = tensor_of(SafetensorsFile::open(folder / "x.safetensors").tensor("w"));

  write_safetensors(folder / "x.safetensors", std::vector<NamedTensor>{{"w", at::zeros({3})}});

  EXPECT_TRUE(view.equal(at::ones({100})));
}

TEST(SafetensorsWriter, RefusesWhatTheReaderWouldRefuse) {
  const TestFolder folder;
  const auto write = [&](const std::string& name) {
    write_safetensors(folder / "x.safetensors", std::vector<NamedTensor>{{name, at::ones({1})}});
  };
  EXPECT_THROW(write(""), UsageError);
  EXPECT_THROW(write("a\nb"), UsageError);
  EXPECT_THROW(write("__metadata__"), UsageError);
  EXPECT_THROW(write("\xff"), UsageError);
  EXPECT_THROW(
      write_safetensors(folder / "x.safetensors",
                        std::vector<NamedTensor>{{"a", at::ones({1})}, {"a", at::ones({1})}}),
      UsageError);
  EXPECT_THROW(write_safetensors(folder / "x.safetensors",
                                 std::vector<NamedTensor>{{"a", at::ones({1}, at::kComplexFloat)}}),
               ShapeError);
  EXPECT_THROW(
      write_safetensors(folder / "x.safetensors", std::vector<NamedTensor>{{"a", at::Tensor()}}),
      ShapeError);
  EXPECT_TRUE(folder.empty());
}

TEST(SafetensorsWriter, AFullDiskNamesFileAndBytesAndLeavesNothing) {
  const TestFolder folder;
  std::string message;
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit limit{4096, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  try {
    write_safetensors(folder / "x.safetensors",
                      std::vector<NamedTensor>{{"w", at::ones({100000})}});
  } catch (const InfrastructureError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &old);

  EXPECT_THAT(message, StartsWith((folder / "x.safetensors").string()));
  EXPECT_THAT(message, HasSubstr("after 4096 bytes"));
  EXPECT_TRUE(folder.empty());
}

}  // namespace
}  // namespace isoshard
