// SPDX-License-Identifier: Apache-2.0
/// Signals, limits and variables around the whole program: documented exit codes, what is known so
/// far is written, no process is left.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "app/testing/exit_codes.h"
#include "app/testing/malformed_rows.h"

namespace isoshard::malformed {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

using namespace codes;

// ---- signals (row 18 of docs/internals/failures.md)
// -----------------------------------------------------------------------------------

struct Interrupted {
  int status = 0;
  std::string output;
  bool left_processes = false;
};

/// Runs a long verify; sends each of `signals` when the first verdict has been printed, and waits
/// for the end of all processes.
Interrupted interrupted_verify(const TestFolder& folder, const std::vector<int>& signals) {
  become_subreaper();
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) throw std::runtime_error("no pipe");
  const pid_t program = ::fork();
  if (program == 0) {
    ::dup2(pipe[1], STDOUT_FILENO);
    ::close(pipe[0]);
    ::close(pipe[1]);
    std::filesystem::current_path(folder.path());
    const int code = run_program(
        {"verify", "--preset", "small", "--steps", "8", "--tables", "off", "--output-dir", "out"});
    std::fflush(nullptr);
    ::_exit(code);
  }
  ::close(pipe[1]);
  Interrupted result;
  std::array<char, 4096> buffer{};
  bool is_sent = false;
  for (ssize_t count = 0; (count = ::read(pipe[0], buffer.data(), buffer.size())) > 0;) {
    result.output.append(buffer.data(), static_cast<std::size_t>(count));
    if (is_sent || result.output.find("CONFORMS") == std::string::npos) continue;
    for (const int signal : signals) ::kill(program, signal);
    is_sent = true;
  }
  ::close(pipe[0]);
  ::waitpid(program, &result.status, 0);
  (void)reap_orphans();  // blocks until the last rank is gone; the test's limit bounds it
  return result;
}

TEST(MalformedSignals, TheFirstStopsTheRanksAndThePartialReportIsWritten) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TestFolder folder;

    const Interrupted result = interrupted_verify(folder, {signal});

    ASSERT_TRUE(WIFEXITED(result.status)) << WTERMSIG(result.status);
    EXPECT_EQ(WEXITSTATUS(result.status), 128 + signal);
    EXPECT_THAT(result.output, HasSubstr("interrupted after "));
    const auto report = nlohmann::json::parse(content_of(folder / "out/report.json"));
    EXPECT_EQ(report.at("exit_code"), 128 + signal);
    ASSERT_GE(report.at("cases").size(), 1U);
    EXPECT_LT(report.at("cases").size(), 8U);
    EXPECT_EQ(report.at("cases")[0].at("status"), "conforms");
    EXPECT_EQ(tree_of(folder / "out").size(), 3U) << "something besides the two reports";
  }
}

TEST(MalformedSignals, TheSecondEndsTheProgramAtOnceAndNoRankIsLeft) {
  const TestFolder folder;

  const Interrupted result = interrupted_verify(folder, {SIGINT, SIGTERM});

  ASSERT_TRUE(WIFEXITED(result.status)) << WTERMSIG(result.status);
  EXPECT_THAT(WEXITSTATUS(result.status), testing::AnyOf(130, 143));
  for (const auto& [path, content] : tree_of(folder / "out"))
    EXPECT_EQ(path.find(".tmp."), std::string::npos) << path;
}

TEST(MalformedSignals, AHangupThatNohupIgnoresEndsNothing) {
  const TestFolder folder;

  const ChildResult result = run_isoshard(folder.path(), one_case(), [] {
    ::signal(SIGHUP, SIG_IGN);
    const pid_t program = ::getpid();
    if (::fork() != 0) return;
    for (int i = 0; i < 100'000; ++i) ::kill(program, SIGHUP);
    ::_exit(0);
  });

  EXPECT_EQ(result.exit_code, kConforms) << result.error;
}

// ---- limits (rows 26, 27)
// -------------------------------------------------------------------------------------------------

TEST(MalformedLimits, TooFewDescriptorsAreToldWithTheLimit) {
  const TestFolder folder;

  const ChildResult result =
      run_isoshard(folder.path(), one_case(), [] { set_limit(RLIMIT_NOFILE, 16); });

  EXPECT_EQ(result.exit_code, kInfrastructure) << result.error;
  EXPECT_THAT(result.output + result.error, HasSubstr("RLIMIT_NOFILE (ulimit -n) is 16"));
  EXPECT_FALSE(result.left_processes);
}

TEST(MalformedLimits, TooFewProcessesAreToldWithTheLimit) {
  const TestFolder folder;
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);

  const ChildResult result = run_isoshard(folder.path(), one_case(), [] {
    give_up_root();
    set_limit(RLIMIT_NPROC, 1);
  });

  EXPECT_EQ(result.exit_code, kInfrastructure) << result.error;
  EXPECT_THAT(result.output + result.error, HasSubstr("RLIMIT_NPROC (ulimit -u) is 1"));
  EXPECT_FALSE(result.left_processes);
}

TEST(MalformedLimits, TooLittleAddressSpaceIsToldWithItsSize) {
  const TestFolder folder;

  const ChildResult result =
      run_isoshard(folder.path(), one_case(), [] { limit_growth(std::size_t{8} << 20); });

  EXPECT_EQ(result.exit_code, kInfrastructure) << result.error;
  EXPECT_THAT(result.output + result.error,
              AllOf(ContainsRegex("[0-9]+ KiB failed"), HasSubstr("Cannot allocate memory")));
  EXPECT_FALSE(result.left_processes);
}

// ---- variables (row 68)
// -------------------------------------------------------------------------------------------------

TEST(MalformedEnvironment, OfOtherSystemsIsRecordedAndChangesNothing) {
  const TestFolder folder;
  const std::map<std::string, std::string> poison = {
      {"OMP_NUM_THREADS", "0"},    {"MKL_NUM_THREADS", "-3"},  {"MASTER_ADDR", "10.0.0.1"},
      {"MASTER_PORT", "99999999"}, {"NCCL_DEBUG", "nonsense"}, {"RANK", "7"},
      {"WORLD_SIZE", "many"},      {"GTEST_FILTER", "-*"},     {"LC_ALL", "de_DE.UTF-8"},
      {"TZ", "\x1b[31mnowhere"}};
  Arguments plain = one_case(), poisoned = one_case();
  plain.insert(plain.end(), {"--output-dir", "plain"});
  poisoned.insert(poisoned.end(), {"--output-dir", "poisoned"});

  const ChildResult expected = run_isoshard(folder.path(), plain);
  const ChildResult result = run_isoshard(folder.path(), poisoned, [&] {
    for (const auto& [name, value] : poison) ::setenv(name.c_str(), value.c_str(), 1);
  });

  EXPECT_EQ(expected.exit_code, kConforms) << expected.error;
  EXPECT_EQ(result.exit_code, kConforms) << result.error;
  EXPECT_EQ(content_of(folder / "poisoned/report.txt"), content_of(folder / "plain/report.txt"));
  const auto report = nlohmann::json::parse(content_of(folder / "poisoned/report.json"));
  for (const auto& [name, value] : poison) {
    const std::string recorded = report.at("environment").at(name);
    EXPECT_EQ(recorded, name == "TZ" ? "\\x1b[31mnowhere" : value) << name;
  }
  const auto before = nlohmann::json::parse(content_of(folder / "plain/report.json"));
  EXPECT_EQ(report.at("cases"), before.at("cases"));
}

// The loader reads some variables before the program's first instruction: this one starts the
// program as a shell does.
TEST(MalformedEnvironment, OfTheLoaderIsShownByDoctor) {
  const ChildResult result = run_in_child([] {
    ::setenv("LD_PRELOAD", "/nonexistent/library.so", 1);
    ::setenv("OMP_NUM_THREADS", "0", 1);
    ::setenv("GTEST_LIST_TESTS", "1", 1);
    ::execl(ISOSHARD_PROGRAM, "isoshard", "doctor", nullptr);
    return 98;
  });

  EXPECT_EQ(result.exit_code, kConforms) << result.error;
  EXPECT_THAT(result.output, AllOf(HasSubstr("LD_PRELOAD=/nonexistent/library.so"),
                                   HasSubstr("OMP_NUM_THREADS=0"), HasSubstr("passed")));
}

TEST(MalformedEnvironment, OfOurOwnIsCheckedAsFlagsAre) {
  const TestFolder folder;
  for (const auto& [name, value] :
       {std::pair{"ISOSHARD_TP", "two"}, std::pair{"ISOSHARD_SEED", "-1"},
        std::pair{"ISOSHARD_DTYPE", "fp31"}}) {
    const ChildResult result =
        run_isoshard(folder.path(), {"verify"}, [&, name = name, value = value] {
          refuse_new_processes();
          ::setenv(name, value, 1);
        });

    EXPECT_EQ(result.exit_code, 2) << name;
    EXPECT_THAT(result.error, HasSubstr(value)) << name;
  }
  for (const char* name : {"ISOSHARD_STEP", "ISOSHARD_COFFEE"}) {  // no option of any command
    const ChildResult result = run_isoshard(folder.path(), {"train"}, [&] {
      refuse_new_processes();
      ::setenv(name, "5", 1);
    });

    EXPECT_EQ(result.exit_code, 2) << name;
    EXPECT_THAT(result.error, HasSubstr(name));
  }
}

}  // namespace
}  // namespace isoshard::malformed
