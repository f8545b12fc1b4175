// SPDX-License-Identifier: Apache-2.0
// What fuzzing found stays found: every file of fuzz/finds/READER was once a crash or a foreign
// exception. Seeds and simple mutants of them are read, too, with no fuzzer.
#include "fuzz/readers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <regex>
#include <string>
#include <vector>

namespace isoshard {
namespace {

namespace fs = std::filesystem;

const fs::path& tree() {
  static const fs::path folder = ISOSHARD_SOURCE_DIR;
  return folder;
}

std::string content_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> files;
  if (!fs::exists(folder)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

/// '*' stands for any part of one name.
std::vector<std::string> seeds_of(const Reader& reader) {
  const std::string pattern(reader.seeds);
  std::string expression;
  for (const char c : pattern)
    expression += c == '*' ? "[^/]*" : c == '.' ? "\\." : std::string(1, c);
  const std::regex fits(expression);
  std::vector<std::string> contents;
  for (const fs::path& file : files_below(tree() / pattern.substr(0, pattern.find('/')))) {
    if (!std::regex_match(fs::relative(file, tree()).generic_string(), fits)) continue;
    // the first byte says which file the rest replaces: its own, so that seeds are the stored
    // bundle
    const auto number = static_cast<char>(contents.size());
    contents.push_back(content_of(file));
    if (reader.name == "bundle") contents.back().insert(0, 1, number);
  }
  return contents;
}

std::string mutated(std::string text, std::mt19937& random) {
  for (int edits = 1 + static_cast<int>(random() % 4); edits > 0 && !text.empty(); --edits) {
    const std::size_t at = random() % text.size();
    switch (random() % 4) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, 1 + random() % 8);
        break;
      case 2:
        text.insert(at, text.substr(random() % text.size(), 1 + random() % 16));
        break;
      default:
        text[at] = "0-9e\"{}[],:\n"[random() % 12];
    }
  }
  return text;
}

class Readers : public ::testing::TestWithParam<Reader> {};

TEST_P(Readers, TakeTheirSeedsAndRefuseMutantsByTheirOwnErrors) {
  const Reader& reader = GetParam();
  const std::vector<std::string> seeds = seeds_of(reader);
  ASSERT_FALSE(seeds.empty()) << reader.seeds;
  std::mt19937 random(7);
  for (int i = 0; i < 400; ++i) {
    const std::string& seed = seeds[static_cast<std::size_t>(i) % seeds.size()];
    const std::string text =
        static_cast<std::size_t>(i) < seeds.size() ? seed : mutated(seed, random);
    EXPECT_NO_THROW(reader.read(text)) << "input " << i;
  }
}

TEST_P(Readers, EndAsTheirHeadersSayOnWhatFuzzingFound) {
  const Reader& reader = GetParam();
  for (const fs::path& file : files_below(tree() / "fuzz" / "finds" / reader.name))
    EXPECT_NO_THROW(reader.read(content_of(file))) << file;
}

// A find that no reader has would never be read.
TEST(Finds, AreBelowTheNameOfAReader) {
  for (const fs::path& file : files_below(tree() / "fuzz" / "finds"))
    EXPECT_NO_THROW((void)find_reader(file.parent_path().filename().string())) << file;
  EXPECT_THROW((void)find_reader("nobody"), std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(All, Readers, ::testing::ValuesIn(readers().begin(), readers().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace isoshard
