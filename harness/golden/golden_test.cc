// SPDX-License-Identifier: Apache-2.0
// Golden files: what is written is read, and nothing else is.
// What a build says of itself. The mode of test programs.
#include "harness/golden/golden.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "harness/golden/golden_mode.h"
#include "harness/golden/test_golden.h"

namespace isoshard {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

/// What reading the text of a golden, changed by `edit`, says.
template <class Edit>
std::string refusal(Edit edit) {
  json changed = json::parse(golden_text(test_golden()));
  edit(changed);
  try {
    (void)parse_golden(changed.dump(), "x.json");
  } catch (const GoldenError& error) {
    return error.what();
  }
  return "no error";
}

TEST(GoldenFile, HoldsEveryBit) {
  const Golden golden = test_golden();

  const Golden read = parse_golden(golden_text(golden), "x.json");

  EXPECT_EQ(golden_text(read), golden_text(golden));
  ASSERT_EQ(read.lines.size(), golden.lines.size());
  for (std::size_t i = 0; i < read.lines.size(); ++i) {
    EXPECT_EQ(read.lines[i].digest, golden.lines[i].digest);
    ASSERT_EQ(read.lines[i].numbers.size(), golden.lines[i].numbers.size());
    for (std::size_t j = 0; j < read.lines[i].numbers.size(); ++j) {
      EXPECT_EQ(read.lines[i].numbers[j].name, golden.lines[i].numbers[j].name)
          << "the order is kept";
      EXPECT_EQ(to_hex(read.lines[i].numbers[j].value), to_hex(golden.lines[i].numbers[j].value));
      EXPECT_EQ(to_hex(read.lines[i].numbers[j].drift), to_hex(golden.lines[i].numbers[j].drift));
    }
  }
  ASSERT_TRUE(read.lines[2].projections.has_value());
  EXPECT_EQ(read.lines[2].projections->values, golden.lines[2].projections->values);
  EXPECT_EQ(read.lines[2].projections->allowed, golden.lines[2].projections->allowed);
  EXPECT_EQ(read.lines[2].copies, "ab-a");
  EXPECT_EQ(read.lines[3].same_as, "step 2");
  EXPECT_FALSE(read.lines[1].projections.has_value());
  EXPECT_EQ(read.config, golden.config);
  EXPECT_EQ(read.fingerprint, golden.fingerprint);
}

TEST(GoldenFile, HasOneLineOfTextForEachOfItsLines) {
  const std::string text = golden_text(test_golden());

  EXPECT_THAT(
      text, HasSubstr("\n  {\"name\":\"step 1\",\"numbers\":{\"loss\":[\"0x1.0000000000001p+1\""));
}

TEST(GoldenFile, RefusesFewerAndMoreLinesThanItsCount) {
  EXPECT_THAT(refusal([](json& j) { j["lines"].erase(1); }),
              AllOf(HasSubstr("x.json"), HasSubstr("count must be the number of lines, 3, got 4")));
  EXPECT_THAT(refusal([](json& j) { j["lines"].push_back(j["lines"][0]); }),
              HasSubstr("count must be the number of lines, 5, got 4"));
  EXPECT_THAT(refusal([](json& j) { j["lines"] = json::array(); }), HasSubstr("has no lines"));
}

TEST(GoldenFile, OfTheFirstSchemaIsReadAndHasNoProjections) {
  json old = json::parse(golden_text(test_golden()));
  old["schema"] = 1;
  for (json& line : old["lines"]) {
    for (const char* added : {"projections", "copies", "same_as"}) line.erase(added);
  }

  const Golden read = parse_golden(old.dump(), "x.json");

  ASSERT_EQ(read.lines.size(), 4U);
  for (const GoldenLine& line : read.lines) {
    EXPECT_FALSE(line.projections.has_value());
    EXPECT_EQ(line.copies + line.same_as, "");
  }
}

TEST(GoldenFile, RefusesAConfigThatIsNotOfItsHash) {
  EXPECT_THAT(refusal([](json& j) { j["config"]["dtype"] = "\"bf16\""; }),
              HasSubstr("config_sha256"));
}

TEST(GoldenFile, RefusesWhatIsNoGolden) {
  EXPECT_THAT(refusal([](json& j) { j["schema"] = 3; }),
              HasSubstr("schema must be 1 or 2, which this program reads, got 3"));
  EXPECT_THAT(refusal([](json& j) { j["kind"] = "curve"; }), HasSubstr("is not a golden"));
  EXPECT_THAT(refusal([](json& j) { j.erase("weights_sha256"); }),
              HasSubstr("has no \"weights_sha256\""));
  EXPECT_THAT(refusal([](json& j) { j["weights_sha256"] = "ab"; }),
              HasSubstr("must have 64 hex digits"));
  EXPECT_THAT(refusal([](json& j) { j["arithmetic"] = "13EBF250FC0CBD41"; }),
              HasSubstr("must have 16 hex digits"));
  EXPECT_THAT(refusal([](json& j) { j["parity"]["holds"] = "yes"; }),
              HasSubstr("must be true or false"));
  EXPECT_THAT(
      refusal([](json& j) { j["lines"][1]["numbers"]["loss"] = json::array({"0x1.0p+1"}); }),
      HasSubstr("must be a value and its drift"));
  EXPECT_THAT(refusal([](json& j) { j["lines"][1]["numbers"]["loss"][0] = "2.0"; }),
              HasSubstr("must be a hex float"));
  EXPECT_THAT(refusal([](json& j) { j["lines"][1]["numbers"]["loss"][1] = "-0x1.0p-9"; }),
              HasSubstr("drift must be at least 0"));
  EXPECT_THAT(refusal([](json& j) { j["lines"][0].erase("digest"); }),
              HasSubstr("must have a digest or numbers"));
  const auto projections = [](json& j) -> json& { return j["lines"][2]["projections"]; };
  EXPECT_THAT(refusal([&](json& j) { projections(j)[1].erase(0); }),
              HasSubstr("must be what is allowed and 8 whole numbers"));
  EXPECT_THAT(refusal([&](json& j) { projections(j)[1][3] = 0.5; }),
              HasSubstr("[1][3] must be a whole number, got 0.5"));
  for (const char* allowed : {"0x0.0p+0", "-0x1.0p+0", "inf", "nan"})
    EXPECT_THAT(refusal([&](json& j) { projections(j)[0] = allowed; }),
                HasSubstr("must be finite and above 0"));
  EXPECT_THAT(refusal([](json& j) { j["lines"][3]["same_as"] = "step 3"; }),
              HasSubstr("same_as must name an earlier line with the same digest, got 'step 3'"));
  EXPECT_THAT(refusal([](json& j) { j["lines"][3]["digest"] = "00000000000000fe"; }),
              HasSubstr("same_as must name"));
  EXPECT_THROW((void)parse_golden("[1, 2", "x.json"), GoldenError);
  EXPECT_THROW((void)parse_golden("", "x.json"), GoldenError);
}

TEST(BuildState, OfDirtyUnknownAndSanitizedBuildsIsUnfit) {
  EXPECT_EQ(unfit_for_goldens({"0123456789abcdef", "clean", ""}), "");
  EXPECT_THAT(unfit_for_goldens({"0123456789abcdef", "dirty", ""}),
              AllOf(HasSubstr("0123456789ab"), HasSubstr("commit them")));
  EXPECT_THAT(unfit_for_goldens({"", "unknown", ""}), HasSubstr("not under version control"));
  EXPECT_THAT(unfit_for_goldens({"0123456789abcdef", "clean", "address,undefined"}),
              HasSubstr("address,undefined"));
}

TEST(BuildState, OfThisBuildIsKnown) {
  const BuildInfo build = build_info();

  EXPECT_TRUE(build.state == "clean" || build.state == "dirty" || build.state == "unknown")
      << build.state;
  EXPECT_EQ(build.commit.size(), build.state == "unknown" ? 0U : 40U);
}

class GoldenMode : public ::testing::Test {
 protected:
  GoldenMode() {
    ::unsetenv("CI");
    ::unsetenv("ISOSHARD_GOLDEN");
  }
  /// What the program's arguments are afterwards, and the mode.
  bool take(std::vector<std::string> words) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int argc = static_cast<int>(words.size());
    const bool records = take_golden_mode(argc, argv.data());
    left_.assign(argv.begin(), argv.begin() + argc);
    return records;
  }
  std::vector<std::string> left_;
};

TEST_F(GoldenMode, IsToCheckUnlessAskedToRecord) {
  EXPECT_FALSE(take({"test", "--gtest_filter=*"}));
  EXPECT_FALSE(is_recording_goldens());
  EXPECT_TRUE(take({"test", "--golden=record", "--gtest_filter=*"}));
  EXPECT_TRUE(is_recording_goldens());
  EXPECT_THAT(left_, testing::ElementsAre("test", "--gtest_filter=*"))
      << "gtest does not see the flag";
  ::setenv("ISOSHARD_GOLDEN", "record", 1);
  EXPECT_TRUE(take({"test"}));
  EXPECT_FALSE(take({"test", "--golden=check"}));
}

TEST_F(GoldenMode, RefusesToRecordWhereCiIsSet) {
  ::setenv("CI", "true", 1);

  EXPECT_FALSE(take({"test"}));
  EXPECT_THROW((void)take({"test", "--golden=record"}), GoldenError);
  ::setenv("ISOSHARD_GOLDEN", "record", 1);
  EXPECT_THROW((void)take({"test"}), GoldenError);
  ::setenv("CI", "", 1);
  EXPECT_TRUE(take({"test"})) << "empty counts as not set";
}

TEST_F(GoldenMode, RefusesOtherWords) {
  EXPECT_THROW((void)take({"test", "--golden=recrod"}), UsageError);
  EXPECT_THROW((void)take({"test", "--golden"}), UsageError);
  EXPECT_THROW((void)take({"test", "--goldens=record"}), UsageError);
}

}  // namespace
}  // namespace isoshard
