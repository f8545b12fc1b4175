// SPDX-License-Identifier: Apache-2.0
// The reader: what it gives, and every way in which it refuses.
#include "core/io/tensor_files.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/io/raw_safetensors.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

SafetensorsFile open_raw(const TestFolder& folder, const std::string& content,
                         const std::string& name = "x.safetensors") {
  write_file_atomically(folder / name, content);
  return SafetensorsFile::open(folder / name);
}

std::string refusal_of(const std::string& content, const std::string& name = "x.safetensors") {
  const TestFolder folder;
  try {
    (void)open_raw(folder, content, name);
  } catch (const FileError& error) {
    const std::string prefix = (folder / name).string() + ": ";
    EXPECT_THAT(error.what(), StartsWith(prefix));
    return std::string(error.what()).substr(prefix.size());
  }
  ADD_FAILURE() << "not refused: " << content.substr(0, 100);
  return "";
}

/// Refusal of a file with four bytes of data and this entry for the tensor 't'.
std::string refusal_of_entry(const std::string& entry) {
  return refusal_of(raw_safetensors("{\"t\":" + entry + "}", "abcd"));
}

TEST(SafetensorsReader, GivesNamesShapesDtypesMetadataAndValues) {
  const TestFolder folder;
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I16","shape":[2],"data_offsets":[8,12]},)"
      R"("a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"n":{"dtype":"BOOL",)"
      R"("shape":[0,3],"data_offsets":[12,12]}}  )";
  const std::string data("\0\0\x80\x3f\0\0\0\xc0\x05\0\xff\xff", 12);

  const SafetensorsFile file = open_raw(folder, raw_safetensors(header, data));

  EXPECT_THAT(file.names(), ElementsAre("a", "b", "n"));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.info("b").dtype, Dtype::kInt16);
  EXPECT_THAT(file.info("a").shape, ElementsAre(2, 1));
  EXPECT_TRUE(tensor_of(file.tensor("a")).equal(at::tensor({1.0F, -2.0F}).reshape({2, 1})));
  EXPECT_TRUE(tensor_of(file.tensor("b")).equal(at::tensor({5, -1}, at::kShort)));
  EXPECT_THAT(tensor_of(file.tensor("n")).sizes().vec(), ElementsAre(0, 3));
  EXPECT_EQ(file.bytes("b").size(), 4U);
  EXPECT_TRUE(file.contains("n"));
  EXPECT_FALSE(file.contains("__metadata__"));
}

TEST(SafetensorsReader, AnAlignedTensorIsAViewThatOutlivesTheFileObject) {
  const TestFolder folder;
  const std::vector<NamedTensor> tensors{{"w", at::arange(1000, at::kDouble)}};
  write_safetensors(folder / "x.safetensors", tensors);
  at::Tensor view;
  {
    const SafetensorsFile file = SafetensorsFile::open(folder / "x.safetensors");
    view = tensor_of(file.tensor("w"));

    EXPECT_EQ(view.const_data_ptr(), file.bytes("w").data());
  }

  EXPECT_TRUE(view.equal(tensors[0].tensor));
}

TEST(SafetensorsReader, AMisalignedTensorIsCopied) {
  const TestFolder folder;
  std::string header = R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  header.append((8 - header.size() % 8) % 8 + 1, ' ');
  const SafetensorsFile file =
      open_raw(folder, raw_safetensors(header, std::string("\0\0\x80\x3f", 4)));

  const at::Tensor w = tensor_of(file.tensor("w"));

  EXPECT_NE(w.const_data_ptr(), static_cast<const void*>(file.bytes("w").data()));
  EXPECT_EQ(w.item<float>(), 1.0F);
}

TEST(SafetensorsReader, AnUnknownNameGetsASuggestion) {
  const TestFolder folder;
  const SafetensorsFile file = open_raw(
      folder, raw_safetensors(
                  R"({"model.norm.weight":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "z"));
  try {
    (void)file.tensor("model.nrom.weight");
    FAIL() << "no error";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean 'model.norm.weight'?"));
  }
}

TEST(SafetensorsReader, AHeaderLengthThatLooksLikeAPickleIsStillRead) {
  const TestFolder folder;
  std::string header = "{}";
  // the file begins with 80 02: a pickle's first two bytes
  header.append(0x280 - header.size(), ' ');

  EXPECT_TRUE(open_raw(folder, raw_safetensors(header)).names().empty());
}

TEST(SafetensorsReader, OpensEveryOracleFile) {
  int files = 0, tensors = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(ISOSHARD_ORACLE_DIR)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file = SafetensorsFile::open(entry.path());
    ++files;
    for (const std::string& name : file.names()) {
      const at::Tensor tensor = tensor_of(file.tensor(name));
      EXPECT_TRUE(std::isfinite(tensor.to(at::kDouble).abs().sum().item<double>()))
          << entry << " " << name;
      ++tensors;
    }
  }
  EXPECT_GT(files, 0) << "no safetensors file below " << ISOSHARD_ORACLE_DIR;
  EXPECT_GT(tensors, files);
}

TEST(SafetensorsRefusals, Lengths) {
  EXPECT_THAT(refusal_of(""), HasSubstr("is 0 bytes long"));
  EXPECT_THAT(refusal_of("\x02\0\0"), HasSubstr("bytes long"));
  EXPECT_THAT(refusal_of(length_bytes(0)), HasSubstr("header length must be above 0"));
  EXPECT_THAT(refusal_of(length_bytes(3) + "{}"), HasSubstr("truncated?"));
  EXPECT_THAT(refusal_of(length_bytes(100'000'001) + "{}"), HasSubstr("at most 100000000"));
  EXPECT_THAT(refusal_of(length_bytes(~std::uint64_t{0}) + "{}"),
              HasSubstr("18446744073709551615"));
  EXPECT_THAT(refusal_of(length_bytes(~std::uint64_t{0} - 7) + "{}"),
              HasSubstr("18446744073709551608"));
}

TEST(SafetensorsRefusals, HeadersThatAreNotStrictJsonObjects) {
  EXPECT_THAT(refusal_of(raw_safetensors("[]")), HasSubstr("must begin with '{', got '['"));
  EXPECT_THAT(refusal_of(raw_safetensors(" {}")), HasSubstr("must begin with '{', got ' '"));
  EXPECT_THAT(refusal_of(raw_safetensors("{\"a\"}")), HasSubstr("strict JSON"));
  EXPECT_THAT(refusal_of(raw_safetensors("{}{}")), HasSubstr("strict JSON"));
  EXPECT_THAT(refusal_of(raw_safetensors(std::string("{}\0\0", 4))), HasSubstr("strict JSON"));
  EXPECT_THAT(refusal_of(raw_safetensors("{" + std::string(200000, '['))),
              HasSubstr("strict JSON"));
  EXPECT_THAT(refusal_of(raw_safetensors("{\"a\":" + std::string(200000, '['))),
              HasSubstr("at most 8 levels deep"));
  const std::string t = R"("t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  EXPECT_THAT(refusal_of(raw_safetensors("{" + t + "," + t + "}", "abcd")),
              HasSubstr("duplicate key 't'"));
}

TEST(SafetensorsRefusals, Entries) {
  EXPECT_THAT(refusal_of_entry("3"),
              StartsWith("tensor 't': its entry must be an object, got a JSON number"));
  EXPECT_THAT(refusal_of_entry(R"({"shape":[4],"data_offsets":[0,4]})"),
              StartsWith("tensor 't': has no dtype"));
  EXPECT_THAT(refusal_of_entry(R"({"dtype":"U8","data_offsets":[0,4]})"),
              HasSubstr("has no shape"));
  EXPECT_THAT(refusal_of_entry(R"({"dtype":"U8","shape":[4]})"), HasSubstr("has no data_offsets"));
  EXPECT_THAT(refusal_of_entry(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"extra":1})"),
              HasSubstr("unknown field 'extra'"));
}

TEST(SafetensorsRefusals, Dtypes) {
  EXPECT_THAT(refusal_of_entry(R"({"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]})"),
              HasSubstr("unknown dtype 'F8_E4M3'"));
  EXPECT_THAT(refusal_of_entry(R"({"dtype":"f32","shape":[1],"data_offsets":[0,4]})"),
              HasSubstr("did you mean 'F32'?"));
  EXPECT_THAT(refusal_of_entry(R"({"dtype":1,"shape":[4],"data_offsets":[0,4]})"),
              HasSubstr("dtype must be a string, got a JSON number"));
}

TEST(SafetensorsRefusals, Shapes) {
  const auto with_shape = [](const std::string& shape) {
    return refusal_of_entry(R"({"dtype":"U8","shape":)" + shape + R"(,"data_offsets":[0,4]})");
  };
  EXPECT_THAT(with_shape("4"), HasSubstr("shape must be an array, got a JSON number"));
  for (const char* size :
       {"-4", "4.0", "\"4\"", "null", "-0", "9223372036854775808", "1e2", "18446744073709551620"}) {
    EXPECT_THAT(with_shape("[" + std::string(size) + "]"),
                HasSubstr("must hold sizes from 0 to 2^63-1, got"))
        << size;
  }
  EXPECT_THAT(with_shape("[4294967296,4294967296]"), HasSubstr("below 2^63"));
  EXPECT_THAT(with_shape("[4294967296,4294967296,0]"), HasSubstr("below 2^63"));
  EXPECT_THAT(with_shape("[9223372036854775807]"), HasSubstr("the 9223372036854775807 bytes"));
  EXPECT_THAT(with_shape("[5]"), HasSubstr("the 5 bytes"));
  EXPECT_THAT(with_shape("[]"), HasSubstr("the 1 bytes"));
  std::string many = "[4";
  for (int i = 0; i < 64; ++i) many += ",1";
  EXPECT_THAT(with_shape(many + "]"), HasSubstr("at most 64 dimensions, got 65"));
}

TEST(SafetensorsRefusals, Offsets) {
  const auto with_offsets = [](const std::string& offsets) {
    return refusal_of_entry(R"({"dtype":"U8","shape":[4],"data_offsets":)" + offsets + "}");
  };
  for (const char* pair : {"4", "[0]", "[0,4,4]", "[-1,3]", "[0.0,4]", "[\"0\",4]", "{}"})
    EXPECT_THAT(with_offsets(pair), HasSubstr("must be a pair")) << pair;
  EXPECT_THAT(with_offsets("[4,0]"), HasSubstr("inside the 4 bytes"));
  EXPECT_THAT(with_offsets("[1,5]"), HasSubstr("inside the 4 bytes"));
  EXPECT_THAT(with_offsets("[18446744073709551612,18446744073709551615]"),
              HasSubstr("must lie inside"));
  EXPECT_THAT(with_offsets("[0,3]"), HasSubstr("span the 4 bytes of shape and dtype, got 3"));
}

TEST(SafetensorsRefusals, HolesOverlapsAndTails) {
  const auto two = [](const std::string& first, const std::string& second) {
    return refusal_of(raw_safetensors(R"({"p":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
                                          R"(},"q":{"dtype":"U8","shape":[2],"data_offsets":)" +
                                          second + "}}",
                                      "abcde"));
  };
  EXPECT_THAT(two("[0,2]", "[3,5]"), StartsWith("tensor 'q': begins at byte 3 of the data, where "
                                                "the tensors before it end at 2 (a hole)"));
  EXPECT_THAT(two("[1,3]", "[3,5]"), HasSubstr("tensor 'p': begins at byte 1"));
  EXPECT_THAT(two("[0,2]", "[1,3]"), HasSubstr("(an overlap)"));
  EXPECT_THAT(two("[0,2]", "[0,2]"), HasSubstr("(an overlap)"));
  EXPECT_THAT(two("[0,2]", "[2,4]"), HasSubstr("1 bytes follow the last tensor"));
  EXPECT_THAT(refusal_of(raw_safetensors("{}", "x")), HasSubstr("1 bytes follow"));
}

TEST(SafetensorsRefusals, Names) {
  const auto with_name = [](const std::string& name) {
    return refusal_of(raw_safetensors(
        "{\"" + name + R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "abcd"));
  };
  for (const char* name :
       {"a\\u0000b", "a\\nb", "\\u001b[31mred", "\\u007f", "\\u009b31m", "a\\tb"}) {
    const std::string message = with_name(name);
    EXPECT_THAT(message, HasSubstr("control character")) << name;
    for (const char c : message) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << name;
  }
  EXPECT_THAT(with_name(""), HasSubstr("its name is empty"));
  EXPECT_THAT(with_name(std::string(1025, 'n')), HasSubstr("1025 bytes long"));
  const TestFolder folder;
  // the last begins with the byte of a control character, but is none
  for (const std::string& good : {std::string(1024, 'n'), std::string("a\\u00b5b")}) {
    EXPECT_NO_THROW((void)open_raw(
        folder, raw_safetensors(
                    "{\"" + good + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "a")));
  }
}

TEST(SafetensorsRefusals, Metadata) {
  EXPECT_THAT(refusal_of(raw_safetensors(R"({"__metadata__":{"a":1}})")),
              HasSubstr("__metadata__ 'a' must be a string, got a JSON number"));
  EXPECT_THAT(refusal_of(raw_safetensors(R"({"__metadata__":[]})")),
              HasSubstr("__metadata__ must be an object, got a JSON array"));
}

TEST(SafetensorsRefusals, PicklesByNameAndContent) {
  for (const char* name : {"model.pt", "model.pth", "pytorch_model.bin", "a.ckpt", "a.pkl"}) {
    EXPECT_THAT(refusal_of(raw_safetensors("{}"), name), HasSubstr("a pickle is never loaded"))
        << name;
  }
  EXPECT_THAT(refusal_of("PK\x03\x04" + std::string(100, 'z')),
              HasSubstr("a pickle is never loaded"));
  EXPECT_THAT(refusal_of("\x80\x02}q" + std::string(100, 'z')),
              HasSubstr("convert it to safetensors"));
  EXPECT_THAT(refusal_of("\x80\x04"), HasSubstr("a pickle is never loaded"));
  EXPECT_THAT(refusal_of("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
              HasSubstr("git lfs pull"));
}

TEST(SafetensorsRefusals, WhatIsNoRegularFile) {
  const TestFolder folder;
  EXPECT_THROW((void)SafetensorsFile::open(folder.path()), FileError);
  EXPECT_THROW((void)SafetensorsFile::open(folder / "missing.safetensors"), FileError);
  EXPECT_THROW((void)SafetensorsFile::open("/dev/zero"), FileError);
}

}  // namespace
}  // namespace isoshard
