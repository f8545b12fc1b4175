// SPDX-License-Identifier: Apache-2.0
// Ids in files: every type is read back, types are derived,
// what does not fit the vocabulary is refused with its numbers.
#include "subjects/data/file_tokens.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/io/tensor_files.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

template <class T>
std::filesystem::path flat_file(const TestFolder& folder, const std::vector<T>& ids,
                                const char* name = "ids.bin") {
  const auto path = folder / name;
  write_file_atomically(path, {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(T)});
  return path;
}

std::filesystem::path tensor_file(const TestFolder& folder,
                                  const std::vector<NamedTensor>& tensors) {
  const auto path = folder / "ids.safetensors";
  write_safetensors(path, tensors);
  return path;
}

std::vector<std::int64_t> sample(const FileTokens& tokens, std::int64_t number,
                                 std::size_t length) {
  std::vector<std::int64_t> ids(length);
  tokens.read(number, ids);
  return ids;
}

template <class T>
void expect_read_back(IdType type) {
  const TestFolder folder;
  const auto path = flat_file<T>(folder, {5, 6, 7, 8, 9, 10, 60000});
  for (const std::optional<IdType> asked : {std::optional<IdType>(type), std::optional<IdType>()}) {
    const FileTokens tokens(path, asked, 60001, 3);

    EXPECT_EQ(tokens.type(), type);
    EXPECT_EQ(tokens.num_samples(), 2);
    EXPECT_THAT(sample(tokens, 0, 3), ElementsAre(5, 6, 7));
    EXPECT_THAT(sample(tokens, 1, 3), ElementsAre(8, 9, 10));
    EXPECT_EQ(sample(tokens, 5, 3), sample(tokens, 1, 3));
  }
}

TEST(FileTokens, FlatIdsAreReadBackWithTheTypeGivenOrDerived) {
  expect_read_back<std::uint16_t>(IdType::kUint16);
  expect_read_back<std::uint32_t>(IdType::kUint32);
  expect_read_back<std::int64_t>(IdType::kInt64);
}

TEST(FileTokens, SmallIdsOfAWideTypeAreNotTakenForZerosBetweenIds) {
  const TestFolder folder;

  EXPECT_EQ(FileTokens(flat_file<std::int64_t>(folder, {1, 2, 3, 4}), {}, 10, 2).type(),
            IdType::kInt64);
  EXPECT_EQ(FileTokens(flat_file<std::uint32_t>(folder, {1, 2, 3, 4}), {}, 10, 2).type(),
            IdType::kUint32);
  EXPECT_EQ(FileTokens(flat_file<std::uint16_t>(folder, {1, 2, 3, 4}), {}, 10, 2).type(),
            IdType::kUint16);
}

TEST(FileTokens, IdsOutsideTheVocabularyAreNamedWithTheirPlace) {
  const TestFolder folder;
  const auto flat = flat_file<std::uint16_t>(folder, {1, 2, 96, 4});
  const auto negative = flat_file<std::int64_t>(folder, {1, -3}, "negative.bin");
  const auto tensor = tensor_file(folder, {{"a", at::tensor({1, 2, 3, 97}, at::kInt)}});

  const auto names_id_96 = AllOf(HasSubstr("ids.bin"), HasSubstr("id 96 at place 2 of 4"),
                                 HasSubstr("vocabulary of 96"));
  EXPECT_THAT([&] { FileTokens(flat, IdType::kUint16, 96, 2); },
              ThrowsMessage<FileError>(names_id_96));
  EXPECT_THAT([&] { FileTokens(flat, {}, 96, 2); }, ThrowsMessage<FileError>(names_id_96));
  EXPECT_NO_THROW(FileTokens(flat, IdType::kUint16, 97, 2));
  EXPECT_THAT([&] { FileTokens(negative, IdType::kInt64, 96, 2); },
              ThrowsMessage<FileError>(HasSubstr("id -3 at place 1 of 2")));
  EXPECT_THAT([&] { FileTokens(tensor, {}, 96, 2); },
              ThrowsMessage<FileError>(HasSubstr("id 97 at place 3 of 4")));
}

TEST(FileTokens, SizesThatDoNotFitAreNamed) {
  const TestFolder folder;
  const auto path = flat_file<std::uint16_t>(folder, {1, 2, 3});
  const auto empty = flat_file<std::uint16_t>(folder, {}, "empty.bin");

  EXPECT_THAT([&] { FileTokens(path, IdType::kUint32, 96, 1); },
              ThrowsMessage<FileError>(HasSubstr("6 bytes are not a whole number of uint32")));
  EXPECT_THAT([&] { FileTokens(path, {}, 96, 4); },
              ThrowsMessage<FileError>(AllOf(HasSubstr("3 ids"), HasSubstr("sequence of 4"))));
  EXPECT_THROW(FileTokens(empty, {}, 96, 4), FileError);
  EXPECT_THROW(FileTokens(folder / "none.bin", {}, 96, 4), FileError);
  EXPECT_THROW(FileTokens(path, {}, 96, 0), UsageError);
}

TEST(FileTokens, TensorsAreFlatOrHaveASampleARow) {
  const TestFolder folder;
  const at::Tensor ids = at::arange(12, at::kLong);

  const FileTokens flat(tensor_file(folder, {{"whatever", ids.to(at::kInt)}}), {}, 12, 5);
  EXPECT_EQ(flat.num_samples(), 2);
  EXPECT_THAT(sample(flat, 1, 5), ElementsAre(5, 6, 7, 8, 9));

  const auto rows = tensor_file(folder, {{"input_ids", ids.view({4, 3})}, {"labels", ids}});
  EXPECT_EQ(FileTokens(rows, IdType::kInt64, 12, 3).num_samples(), 4);
  EXPECT_THAT([&] { FileTokens(rows, {}, 12, 4); },
              ThrowsMessage<FileError>(HasSubstr("got [4, 3]")));
  EXPECT_THAT([&] { FileTokens(rows, IdType::kInt32, 12, 3); },
              ThrowsMessage<UsageError>(HasSubstr("must be int32 as requested, got int64")));
}

TEST(FileTokens, TensorsThatAreNoIdsAreRefused) {
  const TestFolder folder;
  const at::Tensor ids = at::arange(12, at::kLong);

  const auto floats = tensor_file(folder, {{"ids", at::ones({12}, at::kFloat)}});
  EXPECT_THAT(
      [&] { FileTokens(floats, {}, 12, 3); },
      ThrowsMessage<FileError>(HasSubstr("'ids' must be int64, int32, int16 or uint8, got fp32")));
  const auto two = tensor_file(folder, {{"a", ids}, {"b", ids}});
  EXPECT_THAT([&] { FileTokens(two, {}, 12, 3); },
              ThrowsMessage<FileError>(HasSubstr("one named 'input_ids', got 2 others")));
}

TEST(FileTokens, TypesHaveNamesThatAreReadBack) {
  for (const IdType type : {IdType::kUint8, IdType::kInt16, IdType::kUint16, IdType::kInt32,
                            IdType::kUint32, IdType::kInt64}) {
    EXPECT_EQ(parse_id_type(name_of(type)), type);
  }
  EXPECT_THROW((void)parse_id_type("float"), UsageError);
  EXPECT_TRUE(is_token_file("a/b.bin"));
  EXPECT_FALSE(is_token_file("a/b.txt"));
}

}  // namespace
}  // namespace isoshard
