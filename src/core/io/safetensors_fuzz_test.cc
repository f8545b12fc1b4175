// SPDX-License-Identifier: Apache-2.0
// Damaged files: each is refused with a FileError or read with consistent tensors; none crashes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/io/raw_safetensors.h"
#include "core/io/safetensors.h"
#include "core/io/safetensors_header.h"

namespace isoshard {
namespace {

const std::string& valid_file() {
  static const std::string content = raw_safetensors(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"I16","shape":[2],"data_offsets":[8,12]},"n":{"dtype":"BOOL",)"
      R"("shape":[0,3],"data_offsets":[12,12]}})",
      std::string(12, '\x01'));
  return content;
}

/// True if it was read. Every tensor of a file that is read must lie inside it and have the bytes
/// of its shape.
bool read_checked(const std::string& content) {
  try {
    const auto header =
        detail::parse_safetensors_header(std::as_bytes(std::span(content)), "fuzz.safetensors");
    std::uint64_t total = 0;
    for (const auto& [name, info] : header.infos) {
      std::uint64_t bytes = size_of(info.dtype);
      for (const std::int64_t size : info.shape) bytes *= static_cast<std::uint64_t>(size);
      EXPECT_EQ(bytes, info.end - info.begin) << name;
      EXPECT_EQ(detail::name_problem(name), "");
      total += bytes;
    }
    EXPECT_EQ(header.data_begin + total, content.size());
    return true;
  } catch (const FileError&) {
    return false;
  }
}

TEST(SafetensorsFuzz, TheUndamagedFileIsRead) {
  EXPECT_TRUE(read_checked(valid_file()));
}

TEST(SafetensorsFuzz, EveryTruncationIsRefused) {
  for (std::size_t size = 0; size < valid_file().size(); ++size)
    EXPECT_FALSE(read_checked(valid_file().substr(0, size))) << size;
}

TEST(SafetensorsFuzz, EverySingleByteChangeIsRefusedOrConsistent) {
  const std::size_t header_end = valid_file().size() - 12;
  int refused = 0, read = 0;
  for (std::size_t position = 0; position < header_end; ++position) {
    for (int value = 0; value < 256; ++value) {
      std::string damaged = valid_file();
      damaged[position] = static_cast<char>(value);
      ++(read_checked(damaged) ? read : refused);
    }
  }
  EXPECT_GT(refused, 10 * read);  // what survives are other names and the like
  EXPECT_GT(read, 0);
}

TEST(SafetensorsFuzz, RandomFlipsInsertionsAndRemovalsAreRefusedOrConsistent) {
  constexpr std::uint64_t kSeed = 2024;
  std::uint64_t draws = 0;
  const auto draw = [&](std::size_t limit) {
    return static_cast<std::size_t>(random_bits(kSeed, "fuzz", draws++) % limit);
  };
  constexpr std::string_view kStructure = "{}[]\":,0123456789-.eE\\u\x1b\xff\xc2 ntf";
  int read = 0;
  for (int trial = 0; trial < 30000; ++trial) {
    std::string damaged = valid_file();
    for (std::size_t edits = 1 + draw(4); edits > 0; --edits) {
      const std::size_t position = draw(damaged.size());
      switch (draw(4)) {
        case 0:
          damaged[position] = static_cast<char>(draw(256));
          break;
        case 1:
          damaged[position] = kStructure[draw(kStructure.size())];
          break;
        case 2:
          damaged.insert(position, 1, kStructure[draw(kStructure.size())]);
          break;
        default:
          damaged.erase(position, 1 + draw(3));
          break;
      }
      if (damaged.empty()) break;
    }
    if (damaged.size() >= 8 && draw(2) == 0)
      damaged.replace(0, 8, length_bytes(damaged.size() - 8 - draw(damaged.size() - 7)));
    read += read_checked(damaged) ? 1 : 0;
  }
  RecordProperty("read", read);
  EXPECT_LT(read, 30000);
}

}  // namespace
}  // namespace isoshard
