// SPDX-License-Identifier: Apache-2.0
/// Options come from command line, environment and file in this order, and every cause has its exit
/// code.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "core/base/error.h"
#include "harness/cli/options.h"
#include "harness/verdict/exit_code.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
using ::testing::AllOf;
using ::testing::HasSubstr;

OptionTable make_table() {
  OptionTable table;
  table.options.add_options()("config", po::value<std::string>(), "file")(
      "tp", po::value<int>()->default_value(1), "degree")(
      "batch-size", po::value<int>()->default_value(2), "samples")(
      "dtype", po::value<std::vector<std::string>>()->multitoken(), "dtypes");
  table.aliases = {{"tp-size", "tp"}};
  return table;
}

std::string message_of(const std::vector<std::string>& arguments) {
  try {
    (void)parse_options(make_table(), arguments);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

struct EnvironmentGuard {
  explicit EnvironmentGuard(const char* name, const char* value) : name_(name) {
    setenv(name, value, 1);
  }
  ~EnvironmentGuard() { unsetenv(name_); }
  const char* name_;
};

TEST(Options, UnderscoresAndAliasesNameTheSameOption) {
  EXPECT_EQ(parse_options(make_table(), {"--batch_size", "5"}).get<int>("batch-size"), 5);
  EXPECT_EQ(parse_options(make_table(), {"--tp_size=4"}).get<int>("tp"), 4);
}

TEST(Options, CommandLineWinsOverEnvironmentOverFile) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("isoshard_cli_test_" + std::to_string(getpid()) + ".json");
  std::ofstream(path) << R"({"tp": 7, "batch_size": 9, "dtype": ["fp32", "bf16"]})";
  const EnvironmentGuard environment("ISOSHARD_BATCH_SIZE", "8");

  const auto parsed = parse_options(make_table(), {"--config", path.string(), "--tp", "3"});
  std::filesystem::remove(path);

  EXPECT_EQ(parsed.get<int>("tp"), 3);
  EXPECT_EQ(parsed.get<int>("batch-size"), 8);
  EXPECT_THAT(parsed.get<std::vector<std::string>>("dtype"),
              ::testing::ElementsAre("fp32", "bf16"));
  EXPECT_EQ(parsed.origins.at("tp"), "command line");
  EXPECT_EQ(parsed.origins.at("batch-size"), "ISOSHARD_BATCH_SIZE");
  EXPECT_EQ(parsed.origins.at("dtype"), path.string());
}

TEST(Options, UnknownFlagIsAUsageErrorWithASuggestion) {
  EXPECT_THAT(message_of({"--batch-sise", "2"}), HasSubstr("did you mean 'batch-size'"));
  EXPECT_THROW((void)parse_options(make_table(), {"--batch", "2"}), UsageError)
      << "abbreviations must be refused";
}

TEST(Options, MalformedOrRepeatedValuesAreUsageErrors) {
  EXPECT_THROW((void)parse_options(make_table(), {"--tp", "two"}), UsageError);
  EXPECT_THROW((void)parse_options(make_table(), {"--tp"}), UsageError);
  EXPECT_THROW((void)parse_options(make_table(), {"--tp", "2", "--tp", "3"}), UsageError);
}

TEST(Options, BadConfigFilesAreFileErrors) {
  EXPECT_THROW((void)parse_options(make_table(), {"--config", "/nonexistent/file.json"}),
               FileError);
  const auto path = std::filesystem::temp_directory_path() /
                    ("isoshard_cli_bad_" + std::to_string(getpid()) + ".json");
  for (const char* text :
       {"not json", "[1]", R"({"tq": 1})", R"({"tp": {"a": 1}})", R"({"config": "other.json"})"}) {
    std::ofstream(path, std::ios::trunc) << text;
    EXPECT_THROW((void)parse_options(make_table(), {"--config", path.string()}), FileError) << text;
  }
  std::filesystem::remove(path);
}

TEST(Options, ErrorsSayWhereABadValueIsFrom) {
  const EnvironmentGuard environment("ISOSHARD_BATCH_SIZE", "many");

  EXPECT_THAT(message_of({}), AllOf(HasSubstr("'many'"), HasSubstr("ISOSHARD_BATCH_SIZE is set")));
  EXPECT_THROW((void)parse_options(make_table(), {}), UsageError);
}

TEST(Options, VariablesMayBeAliasesOrEmptyAndTyposAreNamed) {
  const EnvironmentGuard alias("ISOSHARD_TP_SIZE", "4"), empty("ISOSHARD_BATCH_SIZE", "");

  EXPECT_EQ(parse_options(make_table(), {}).get<int>("tp"), 4);
  EXPECT_EQ(parse_options(make_table(), {}).get<int>("batch-size"), 2);
  const EnvironmentGuard typo("ISOSHARD_BATCH_SISE", "3");
  EXPECT_THAT(message_of({}), AllOf(HasSubstr("ISOSHARD_BATCH_SISE is set"),
                                    HasSubstr("did you mean ISOSHARD_BATCH_SIZE?")));
}

TEST(Options, VariablesOfOtherCommandsAreLeftAlone) {
  OptionTable table = make_table();
  const EnvironmentGuard other("ISOSHARD_BATCH_SIZES", "3");
  table.elsewhere = {"batch-sizes"};

  EXPECT_EQ(parse_options(table, {}).get<int>("batch-size"), 2);
}

TEST(Options, VariablesThatAreNoOptionOfAnyCommandAreRefused) {
  OptionTable table = make_table();
  table.elsewhere = {"steps"};
  table.refuses_unknown_variables = true;
  for (const char* name : {"ISOSHARD_STEP", "ISOSHARD_COFFEE"}) {
    const EnvironmentGuard unknown(name, "5");
    EXPECT_THROW((void)parse_options(table, {}), UsageError) << name;
  }
  const EnvironmentGuard option("ISOSHARD_STEPS", "5"), launcher("ISOSHARD_BUILD_DIR", "build");
  EXPECT_NO_THROW((void)parse_options(table, {}));
}

TEST(Options, UnexpectedArgumentsAreNamed) {
  EXPECT_THAT(message_of({"--tp", "2", "stray"}), HasSubstr("unexpected argument 'stray'"));
}

TEST(Options, HelpShowsGroupsUnderTheirHeadings) {
  OptionTable table;
  table.group("general")("help,h", po::bool_switch(), "show this help");
  table.options.add_options()("name", po::value<std::string>(), "in no group");
  auto output = table.group("output");
  output("verbose", po::bool_switch(), "more");
  table.group("mesh")("tp", po::value<int>(), "degree");
  output("output-dir", po::value<std::string>(), "folder");
  table.leading_groups = {"mesh"};

  const std::string text = help_text(table);

  std::vector<std::size_t> places;
  for (const char* const part : {"mesh:\n", "--tp arg", "options:\n", "--name arg", "output:\n",
                                 "--verbose", "--output-dir arg", "general:\n", "--help"}) {
    ASSERT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
    places.push_back(text.find(part));
  }
  EXPECT_TRUE(std::is_sorted(places.begin(), places.end())) << text;
}

TEST(ExitCodes, EveryCauseHasItsCode) {
  EXPECT_EQ(exit_code_of(Status::kConforms), 0);
  EXPECT_EQ(exit_code_of(Status::kDiverges), 1);
  EXPECT_EQ(exit_code_of(Status::kVacuous), 1);
  EXPECT_EQ(exit_code_of(Status::kIncomplete), 4);
  EXPECT_EQ(exit_code_of(UsageError("x")), 2);
  EXPECT_EQ(exit_code_of(FileError("x")), 3);
  EXPECT_EQ(exit_code_of(InfrastructureError("x")), 4);
  EXPECT_EQ(exit_code_of(TimeoutError("x")), 4);
  EXPECT_EQ(exit_code_of(std::bad_alloc()), 4);
  EXPECT_EQ(exit_code_of(GoldenError("x")), 5);
  EXPECT_EQ(exit_code_of(VacuousError("x")), 1);
}

TEST(ExitCodes, TheGraverCodeWinsInEitherOrder) {
  const std::vector<int> by_gravity = {0, 5, 1, 4, 143, 130};
  for (std::size_t i = 0; i < by_gravity.size(); ++i) {
    for (std::size_t j = 0; j < by_gravity.size(); ++j) {
      EXPECT_EQ(combine_exit_codes(by_gravity[i], by_gravity[j]), by_gravity[std::max(i, j)]);
    }
  }
}

}  // namespace
}  // namespace isoshard
