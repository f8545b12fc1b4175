// SPDX-License-Identifier: Apache-2.0
/// Manual pages, completion and --help are made from what commands declare; a report says how to
/// repeat its command.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <boost/program_options/value_semantic.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/base/error.h"
#include "harness/cli/examples.h"
#include "harness/cli/man_page.h"
#include "harness/cli/output.h"
#include "harness/cli/progress.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

Command a_command(const std::string& name, const std::string& group) {
  Command command{name,
                  "does " + name,
                  name + " [options]",
                  "  prog " + name + " --tp 2",
                  [](OptionTable& table) {
                    auto add = table.group("mesh");
                    add("tp", po::value<int>()->default_value(1), "-ranks of \\tp\n.so");
                    add("dry-run", po::bool_switch(), "run nothing");
                    add("names", po::value<std::vector<std::string>>()->multitoken(), "some");
                    add("input", po::value<std::string>(), "a file");
                    table.positional.add("input", 1);
                  },
                  [](const ParsedOptions&) { return 0; }};
  command.judges = true;
  command.group = group;
  return command;
}

const ProgramWords kProgram{"prog", "proves things", "", "verify --tp 2"};

TEST(Manual, HasEveryOptionOfACommandUnderItsHeading) {
  const std::string page = man_page(kProgram, a_command("verify", "judge"));

  EXPECT_THAT(page, HasSubstr(".TH PROG\\-VERIFY 1\n.SH NAME\nprog\\-verify \\- does verify\n"));
  EXPECT_THAT(page, HasSubstr(".SS mesh\n.TP\n\\fB\\-\\-tp\\fR \\fIarg (=1)\\fR\n"));
  EXPECT_THAT(page, HasSubstr(".TP\n\\fB\\-\\-dry\\-run\\fR\nrun nothing\n"));
  EXPECT_LT(page.find("\\-\\-tp"), page.find(".SS general"));
}

TEST(Manual, LetsNoTextBeARequest) {
  const std::string page = man_page(kProgram, a_command("verify", "judge"));

  EXPECT_THAT(page, HasSubstr("\\-ranks of \\etp\n\\&.so\n"));
}

TEST(Manual, OfTheProgramListsCommandsInTheirGroups) {
  const std::array commands = {a_command("verify", "judge"), a_command("list", "look up")};

  const std::string page = man_page(kProgram, commands);

  EXPECT_LT(page.find(".SS judge"), page.find("verify"));
  EXPECT_LT(page.find("verify"), page.find(".SS look up"));
  EXPECT_THAT(page, HasSubstr("prog\\-list(1)"));
}

/// What bash offers for the last of `words`, sorted.
std::string offered_by_bash(const std::string& script, const std::string& words) {
  const auto file = std::filesystem::temp_directory_path() /
                    ("isoshard_completion_" + std::to_string(getpid()) + ".bash");
  std::ofstream(file) << script << "COMP_WORDS=(" << words << ")\n"
                      << "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_prog\n"
                      << "printf '%s\\n' \"${COMPREPLY[@]}\" | sort | tr '\\n' ' '\n";
  std::string output;
  FILE* const pipe = popen(("bash " + file.string() + " 2>&1").c_str(), "r");
  std::array<char, 256> part{};
  while (fgets(part.data(), static_cast<int>(part.size()), pipe) != nullptr) output += part.data();
  pclose(pipe);
  std::filesystem::remove(file);
  return output;
}

TEST(Completion, OfBashOffersCommandsAndTheOptionsOfEach) {
  const std::array commands = {a_command("verify", "judge"), a_command("view", "judge")};
  const std::string script = completion_script(kProgram, commands, "bash");

  EXPECT_EQ(offered_by_bash(script, "prog v"), "verify view ");
  EXPECT_EQ(offered_by_bash(script, "prog verify --d"), "--dry-run ");
  EXPECT_THAT(offered_by_bash(script, "prog verify --"),
              AllOf(HasSubstr("--tp "), HasSubstr("--quiet "), HasSubstr("--help ")));
}

TEST(Completion, IsThereForThreeShellsAndNoOther) {
  const std::array commands = {a_command("verify", "judge")};
  EXPECT_THAT(
      completion_script(kProgram, commands, "zsh"),
      AllOf(HasSubstr("#compdef prog"), HasSubstr("verify) compadd --"), HasSubstr(" --dry-run")));
  EXPECT_THAT(completion_script(kProgram, commands, "fish"),
              HasSubstr("complete -c prog -n '__fish_seen_subcommand_from verify' -l dry-run"));
  EXPECT_THROW((void)completion_script(kProgram, commands, "csh"), UsageError);
}

TEST(Repeat, GivesEveryOptionThatWasGivenAndNoneThatSaysWhereResultsGo) {
  const Command command = a_command("verify", "judge");
  const OptionTable table = options_of(command);

  const ParsedOptions parsed =
      parse_options(table, {"--names", "a", "b c", "--quiet", "--dry_run", "--tp", "3", "file"});

  EXPECT_THAT(parsed.repeat, ElementsAre("file", "--tp=3", "--dry-run", "--names", "a", "b c"));
  EXPECT_EQ(parsed.settings.at("tp"), "3");
  // and is what it says
  const ParsedOptions again = parse_options(table, parsed.repeat);
  EXPECT_EQ(again.get<int>("tp"), 3);
  EXPECT_EQ(again.get<std::string>("input"), "file");
  EXPECT_EQ(again.repeat, parsed.repeat);
}

TEST(Repeat, KeepsWordsBehindTwoDashesAsTheyAre) {
  OptionTable table;
  table.options.add_options()("command", po::value<std::vector<std::string>>()->multitoken(), "x");
  table.positional.add("command", -1);
  const ParsedOptions parsed = parse_options(table, {"--", "run", "--tp_size", "2"});
  EXPECT_THAT(parsed.get<std::vector<std::string>>("command"),
              ElementsAre("run", "--tp_size", "2"));
}

TEST(Pace, SaysRateAndRemainingTime) {
  EXPECT_EQ(pace_in_words(10, 100, 5), "2 per s, 45 s left");
  EXPECT_EQ(pace_in_words(2, 6, 8), "4 s each, 16 s left");
  EXPECT_EQ(pace_in_words(1, 50, 60), "60 s each, 49 min left");
  EXPECT_THAT(pace_in_words(0, 100, 5), IsEmpty());
  EXPECT_THAT(pace_in_words(100, 100, 5), IsEmpty());
}

TEST(Quiet, LeavesTheSummary) {
  ReportCase right{.name = "right"}, wrong{.name = "wrong"};
  right.verdict.emplace();
  right.verdict->status = Status::kConforms;
  wrong.verdict.emplace();
  wrong.verdict->status = Status::kDiverges;
  wrong.verdict->reason = "it is off";
  Report report;
  report.notes = {"a note"};
  report.add(right);
  report.add(wrong);
  report.summary = "1 of 2";
  TextOptions quiet;
  quiet.detail = Detail::kSummary;

  EXPECT_EQ(text_of(report, quiet), "1 of 2\n");
}

/// Sets a variable of the environment while it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

TEST(Columns, AreThoseOfTheEnvironmentIfThatIsANumberOfThem) {
  {
    const Variable columns("COLUMNS", "60");
    EXPECT_EQ(terminal_columns(), 60U);
    EXPECT_EQ(terminal_options().verdict.columns, 60U);
  }
  for (const char* const wrong : {"", "0", "-60", "60x", "3", "99999999999999999999"}) {
    const Variable columns("COLUMNS", wrong);
    EXPECT_GE(terminal_columns(77), 20U) << wrong;
    EXPECT_LE(terminal_columns(77), 1000U) << wrong;
  }
}

TEST(Columns, HoldHelpToo) {
  const std::string help = help_text(options_of(a_command("verify", "judge")), 60);

  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 60U) << line;
}

TEST(Detail, IsQuietOrVerboseAndNotBoth) {
  const std::array commands = {a_command("verify", "judge")};
  EXPECT_EQ(run_command_line(kProgram, commands, {"verify", "--quiet"}), 0);
  EXPECT_EQ(output_detail(), Detail::kSummary);
  EXPECT_EQ(run_command_line(kProgram, commands, {"verify", "--verbose"}), 0);
  EXPECT_EQ(output_detail(), Detail::kFull);
  EXPECT_EQ(run_command_line(kProgram, commands, {"verify"}), 0);
  EXPECT_EQ(output_detail(), Detail::kBrief);
  EXPECT_EQ(run_command_line(kProgram, commands, {"verify", "--quiet", "--verbose"}), 2);
}

TEST(Examples, StandBesideWhatTheyDoIfAllFit) {
  EXPECT_EQ(examples_in_columns("  prog   all of it\n  prog --tp 2              two ranks"),
            "  prog         all of it\n  prog --tp 2  two ranks\n");
  EXPECT_EQ(examples_in_columns("  prog --tp 2"), "  prog --tp 2\n");
}

TEST(Examples, StandAboveWhatTheyDoIfOneIsTooLong) {
  const std::string flags = " --first-flag 1 --second-flag \"two words\" --third-flag 3";
  EXPECT_EQ(examples_in_columns("  prog --tp 2   two ranks\n  prog" + flags + " \\\n      " +
                                flags + "   what takes\n                             two lines"),
            "  prog --tp 2\n"
            "      two ranks\n"
            "  prog --first-flag 1 --second-flag \"two words\" --third-flag 3 "
            "--first-flag 1 \\\n"
            "      --second-flag \"two words\" --third-flag 3\n"
            "      what takes two lines\n");
  const std::string does(90, 'x');
  EXPECT_EQ(examples_in_columns("  prog   " + does), "  prog\n      " + does + "\n")
      << "a word that is longer than a line stays whole";
}

}  // namespace
}  // namespace isoshard
