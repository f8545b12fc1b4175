// SPDX-License-Identifier: Apache-2.0
// Strict JSON: what is read, and that everything else is refused with the path in front.
#include "core/io/json.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string refusal_of(const std::string& text, const JsonLimits& limits = {}) {
  try {
    (void)parse_json(text, "dir/file.json", limits);
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), StartsWith("dir/file.json: "));
    return error.what();
  }
  ADD_FAILURE() << "not refused: " << text.substr(0, 80);
  return "";
}

std::string nested(std::size_t depth) {
  return std::string(depth, '[') + std::string(depth, ']');
}

TEST(Json, ReadsEveryKindOfValueAsTheLibraryDoes) {
  const std::string text =
      R"( {"a": [1, -2, 2.5, true, false, null, "\u00e4\n"], "b": {"c": {}, "d": []},)"
      R"( "e": 18446744073709551615} )";

  EXPECT_EQ(parse_json(text, "x"), nlohmann::json::parse(text));
  EXPECT_EQ(parse_json("3", "x"), nlohmann::json(3));
  EXPECT_TRUE(parse_json("[5]", "x")[0].is_number_unsigned());
}

TEST(Json, RefusesWhatIsNotOneStrictValue) {
  const std::vector<std::string> cases{"",
                                       " ",
                                       "{",
                                       "[1,]",
                                       "{\"a\":1,}",
                                       "{} x",
                                       "{}{}",
                                       "'a'",
                                       "{a:1}",
                                       "NaN",
                                       "Infinity",
                                       "01",
                                       "// c\n1",
                                       "[1 2]",
                                       "\"\t\"",
                                       "\"\\ud800\"",
                                       "1e999",
                                       "\"\xff\"",
                                       "\"\xc0\xaf\"",
                                       "\"\xed\xa0\x80\"",
                                       "tru",
                                       std::string("1\0", 2),
                                       "\"unterminated"};
  for (const std::string& text : cases)
    EXPECT_THAT(refusal_of(text), HasSubstr("strict JSON at byte")) << text;
}

TEST(Json, RefusesAByteOrderMark) {
  EXPECT_THAT(refusal_of("\xEF\xBB\xBF{}"), HasSubstr("byte-order mark"));
  EXPECT_THAT(refusal_of(std::string("\xFF\xFE{\0}\0", 6)), HasSubstr("strict JSON"));
}

TEST(Json, RefusesDuplicateKeysAtAnyDepth) {
  EXPECT_THAT(refusal_of(R"({"a": 1, "b": 2, "a": 1})"), HasSubstr("duplicate key 'a'"));
  EXPECT_THAT(refusal_of(R"([{"x": {"k": 1, "\u006b": 2}}])"), HasSubstr("duplicate key 'k'"));
  EXPECT_NO_THROW((void)parse_json(R"({"a": {"a": 1}, "b": {"a": 1}})", "x"));
}

TEST(Json, DepthIsLimitedAndAHundredThousandLevelsDoNotCrash) {
  EXPECT_NO_THROW((void)parse_json(nested(64), "x"));
  EXPECT_THAT(refusal_of(nested(65)), HasSubstr("at most 64 levels deep"));
  EXPECT_THAT(refusal_of(std::string(100000, '[')), HasSubstr("at most 64 levels deep"));
  EXPECT_NO_THROW((void)parse_json(nested(100000), "x", {.max_depth = 100000}));
}

TEST(Json, SizeAndNumberOfValuesAreLimited) {
  EXPECT_THAT(refusal_of("[1,2,3]", {.max_bytes = 6}), HasSubstr("at most 6 bytes of JSON, got 7"));
  EXPECT_THAT(refusal_of("[1,2,3]", {.max_values = 3}), HasSubstr("at most 3 JSON values"));
  std::string million = "{";
  for (int i = 0; i < 1000000; ++i) fmt::format_to(std::back_inserter(million), "\"{}\":0,", i);
  million.back() = '}';
  EXPECT_THAT(refusal_of(million), HasSubstr("at most 262144 JSON values"));
}

TEST(Json, MessagesCarryNoControlCharactersOfTheFile) {
  for (const std::string& text :
       {std::string("\"\x1b[31m\""), std::string("{\"\\u001b[2J\":1,\"\\u001b[2J\":1}"),
        std::string("\x1b]0;x\x07")}) {
    for (const char c : refusal_of(text)) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << text;
  }
}

TEST(Json, ReadsAFileAndRefusesAFolder) {
  const TestFolder folder;
  write_file_atomically(folder / "a.json", "{\"n\": 1}\n");

  EXPECT_EQ(read_json_file(folder / "a.json")["n"], 1);
  EXPECT_THROW((void)read_json_file(folder.path()), FileError);
  EXPECT_THROW((void)read_json_file(folder / "b.json"), FileError);
}

}  // namespace
}  // namespace isoshard
