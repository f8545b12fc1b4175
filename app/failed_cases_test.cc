// SPDX-License-Identifier: Apache-2.0
/// What an earlier run had wrong is run again, with its options.
#include "app/options/failed_cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "core/base/error.h"
#include "harness/cli/command.h"
#include "harness/testing/test_child.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

json a_case(const char* name, const char* status, json unmet = nullptr) {
  return {{"case", name}, {"status", status}, {"unmet", unmet}};
}

json a_report() {
  return {{"provenance",
           {{"command", {"isoshard", "verify", "--preset=small", "--subjects", "ddp", "autotp"}}}},
          {"cases",
           {a_case("a", "conforms"), a_case("b", "diverges"), a_case("c", "incomplete"),
            a_case("d", "conforms", "must be exact")}}};
}

std::filesystem::path stored(const TestFolder& folder, const json& report) {
  std::ofstream(folder.path() / "report.json") << report;
  return folder.path();
}

TEST(FailedCases, AreThoseThatAreNotAsTheyShouldBe) {
  const TestFolder folder;

  const FailedCases failed = failed_cases_of(stored(folder, a_report()));

  EXPECT_THAT(failed.cases, ElementsAre("b", "c", "d"));
  EXPECT_THAT(failed.words, ElementsAre("--preset=small", "--subjects", "ddp", "autotp"));
}

TEST(FailedCases, AreRefusedWhereNothingFailedOrTheReportDoesNotSay) {
  const TestFolder folder;
  json report = a_report();
  report["cases"] = {a_case("a", "conforms")};
  EXPECT_THAT([&] { (void)failed_cases_of(stored(folder, report)); },
              ThrowsMessage<UsageError>(HasSubstr("every case of")));
  report = a_report();
  report["provenance"]["command"][1] = "train";
  EXPECT_THAT([&] { (void)failed_cases_of(stored(folder, report)); },
              ThrowsMessage<FileError>(HasSubstr("must be a report of verify")));
  report.erase("provenance");
  EXPECT_THAT([&] { (void)failed_cases_of(stored(folder, report)); },
              ThrowsMessage<FileError>(HasSubstr("does not say how its cases ran")));
}

TEST(FailedCases, AreRefusedOfARunThatDidNotRunAll) {
  const TestFolder folder;
  json report = a_report();
  report["provenance"]["command"].push_back("--fail-fast");

  EXPECT_THAT([&] { (void)failed_cases_of(stored(folder, report)); },
              ThrowsMessage<UsageError>(HasSubstr("again without --fail-fast")));
}

TEST(FailedCases, TakeOptionsThatAreGivenNowFirst) {
  EXPECT_THAT(merged_options({"--subjects=nd", "--quiet"},
                             {"--preset=small", "--subjects", "ddp", "autotp", "--tp=2"}),
              ElementsAre("--subjects=nd", "--quiet", "--preset=small", "--tp=2"));
}

TEST(FailedCases, OfAReportRunAgainWithItsOptions) {
  const TestFolder folder;
  const auto verify = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "verify");
    return run_in_child([&] {
      const std::vector<Command> commands = {verify_command()};
      return run_command_line(commands, words);
    });
  };
  // within tolerance is not enough for one of two cases
  const ChildResult first = verify({"--preset", "small", "--subjects", "ddp", "autotp", "--tp", "2",
                                    "--dp", "2", "--dtype", "fp32", "--output-dir", folder.path()});
  ASSERT_EQ(first.exit_code, 0) << first.output << first.error;
  json report;
  std::ifstream(folder.path() / "report.json") >> report;
  for (json& item : report["cases"])
    if (item["subject"] == "autotp") item["status"] = "diverges";

  const ChildResult again = verify({"--failed-from", stored(folder, report), "--quiet"});

  EXPECT_EQ(again.exit_code, 0) << again.error;
  EXPECT_THAT(again.output, AllOf(HasSubstr("1 of 1 case conforms"), Not(HasSubstr("ddp"))));
}

}  // namespace
}  // namespace isoshard
