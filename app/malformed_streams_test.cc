// SPDX-License-Identifier: Apache-2.0
/// Standard input, output and error that are closed, full or gone: no abort, the exit code stands,
/// the report is on disk, the lock is free.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "app/testing/exit_codes.h"
#include "app/testing/malformed_rows.h"

namespace isoshard::malformed {
namespace {

using ::testing::HasSubstr;

using namespace codes;

const Arguments kOneFault = {"verify", "--fault", "mlp_input_grad_partial", "--output-dir", "out"};

struct Streams {
  const char* name;
  void (*spoil)();
  bool output_is_lost_to_an_error;  ///< else nobody wants it
};

void become_full(int fd) {
  ::dup2(::open("/dev/full", O_WRONLY), fd);
}

// A pipe that nobody reads any more, as behind `| head -1`.
void lose_reader(int fd) {
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) throw std::runtime_error("no pipe");
  ::close(pipe[0]);
  ::dup2(pipe[1], fd);
  ::close(pipe[1]);
}

const Streams kStreams[] = {
    {"NoInput", [] { ::close(0); }, false},
    {"NoOutput", [] { ::close(1); }, false},
    {"NoError", [] { ::close(2); }, false},
    {"None",
     [] {
       for (const int fd : {0, 1, 2}) ::close(fd);
     },
     false},
    {"FullOutput", [] { become_full(1); }, true},
    {"FullError", [] { become_full(2); }, false},
    {"FullBoth",
     [] {
       become_full(1);
       become_full(2);
     },
     true},
    {"ReaderOfOutputGone", [] { lose_reader(1); }, false},
    {"ReadersGone",
     [] {
       lose_reader(1);
       lose_reader(2);
     },
     false},
};

void PrintTo(const Streams& streams, std::ostream* out) {
  *out << streams.name;
}

class MalformedStreams : public testing::TestWithParam<Streams> {
 protected:
  [[nodiscard]] ChildResult run(const Arguments& arguments) const {
    return run_isoshard(folder_.path(), arguments, GetParam().spoil);
  }
  TestFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Streams, MalformedStreams, testing::ValuesIn(kStreams),
                         [](const auto& streams) { return std::string(streams.param.name); });

TEST_P(MalformedStreams, LeaveTheVerdictTheReportAndTheLock) {
  for (const auto& [arguments, code] :
       {std::pair{one_case({"--output-dir", "out"}), kConforms}, std::pair{kOneFault, kDiverges}}) {
    const ChildResult result = run(arguments);

    EXPECT_EQ(result.exit_code, code) << result.error << "signal " << result.signal;
    const auto report = nlohmann::json::parse(content_of(folder_ / "out/report.json"));
    EXPECT_EQ(report.at("exit_code"), code);
    EXPECT_EQ(tree_of(folder_ / "out").size(), 3U) << "something besides the two reports";
    EXPECT_EQ(content_of(folder_ / "out/report.txt").find("isoshard:"), std::string::npos);
    EXPECT_FALSE(result.left_processes);
    std::filesystem::remove_all(folder_ / "out");
  }
}

TEST_P(MalformedStreams, OfACommandWhoseOutputIsItsProductAreAnErrorOnlyIfItIsLost) {
  const int expected = GetParam().output_is_lost_to_an_error ? kInfrastructure : kConforms;
  for (const Arguments& arguments :
       {Arguments{"list", "faults"}, Arguments{"explain", "tp.column.forward"},
        Arguments{"golden", "status"}, Arguments{"verify", "--help"}, Arguments{"--help"},
        Arguments{"--version"}, Arguments{"verify", "--print-config"}, Arguments{"doctor"}}) {
    const ChildResult result = run(arguments);

    EXPECT_EQ(result.exit_code, expected) << arguments.front() << result.error;
    EXPECT_EQ(result.signal, 0) << arguments.front();
  }
}

TEST_P(MalformedStreams, LeaveTheExitCodeOfAWrongOption) {
  for (const Arguments& arguments : {Arguments{"verify", "--nothing"}, Arguments{"nothing"},
                                     Arguments{"compare", "a", "--output-dir", "out"}}) {
    const ChildResult result = run(arguments);

    EXPECT_EQ(result.exit_code, kUsage) << arguments.front() << "signal " << result.signal;
  }
}

TEST(MalformedStream, ThatIsFullIsToldOnStandardErrorBesideTheVerdict) {
  const TestFolder folder;

  const ChildResult result =
      run_isoshard(folder.path(), one_case({"--output-dir", "out"}), [] { become_full(1); });

  EXPECT_EQ(result.exit_code, kConforms);
  EXPECT_THAT(result.error, HasSubstr("cannot write to standard output: No space left on device"));
}

}  // namespace
}  // namespace isoshard::malformed
