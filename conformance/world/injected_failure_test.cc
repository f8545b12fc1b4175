// SPDX-License-Identifier: Apache-2.0
/// Rarer ways to fail, injected for real: processes left behind, a killed controller, handlers that
/// hang, floods of output.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "conformance/world/deadlines.h"
#include "core/comm/communicator.h"
#include "harness/testing/run_world.h"
#include "harness/testing/test_child.h"
#include "harness/testing/test_folder.h"
#include "harness/world/interrupt.h"
#include "suite/testing/world_probes.h"

namespace isoshard {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// An int that forked processes share.
class SharedInt {
 public:
  SharedInt()
      : value_(static_cast<std::atomic<int>*>(::mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE,
                                                     MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedInt() { ::munmap(value_, sizeof(int)); }
  SharedInt(const SharedInt&) = delete;
  SharedInt& operator=(const SharedInt&) = delete;
  std::atomic<int>& operator*() const { return *value_; }

 private:
  std::atomic<int>* value_;
};

WorldReport two_ranks(const ForkedWorld::Body& of_rank_1,
                      std::chrono::milliseconds deadline = kLongDeadline) {
  return run_world_report({.size = 2, .name = "injected", .deadline = deadline}, [&](Rank& rank) {
    summed(rank, 1);
    if (rank.rank() == 1) of_rank_1(rank);
  });
}

void expect_next_world_runs() {
  const WorldReport next =
      run_world_report({.size = 2}, [](Rank& rank) { EXPECT_EQ(summed(rank, 1), 2); });
  EXPECT_TRUE(next.ok()) << next.describe();
}

// ---- what ranks leave behind (row 21)
// ---------------------------------------------------------------------------------------

// As daemon(3): two forks and a session of its own; tells its process number when it runs.
void start_daemon(std::atomic<int>& pid) {
  if (::fork() == 0) {
    ::setsid();
    if (::fork() == 0) {
      pid = ::getpid();
      loop_for_ever();
    }
    ::_exit(0);
  }
  ::wait(nullptr);
  while (pid == 0) ::sched_yield();
}

TEST(InjectedFailure, ADaemonThatARankStartedIsKilledAndNamed) {
  const SharedInt daemon;

  const WorldReport report = two_ranks([&](Rank&) { start_daemon(*daemon); });

  EXPECT_FALSE(report.ok());
  EXPECT_EQ(report.culprit, 1);
  EXPECT_THAT(report.cause, AllOf(HasSubstr("rank 1 left processes behind"),
                                  HasSubstr(fmt::format("process {} (", (*daemon).load()))));
  EXPECT_EQ(::kill(*daemon, 0), -1) << "the daemon is still there";
  EXPECT_EQ(report.ranks[0].end, RankEnd::kReturned);
  expect_next_world_runs();
}

TEST(InjectedFailure, AChildOfARankThatCrashedIsKilledAndNamed) {
  const SharedInt daemon;

  const WorldReport report = two_ranks([&](Rank&) {
    start_daemon(*daemon);
    ::raise(SIGKILL);
  });

  EXPECT_EQ(report.culprit, 1);
  EXPECT_THAT(report.cause, AllOf(HasSubstr("rank 1 killed by SIGKILL"),
                                  HasSubstr(fmt::format("process {} (", (*daemon).load()))));
  EXPECT_EQ(::kill(*daemon, 0), -1) << "the daemon is still there";
}

TEST(InjectedFailure, ChildrenOfTheProgramItselfAreLeftAlone) {
  const pid_t own = ::fork();
  if (own == 0) loop_for_ever();

  const WorldReport crashed = two_ranks([](Rank&) { ::raise(SIGKILL); });

  EXPECT_THAT(crashed.cause, Not(HasSubstr("left behind")));
  EXPECT_EQ(::kill(own, 0), 0);
  ::kill(own, SIGKILL);
  EXPECT_EQ(::waitpid(own, nullptr, 0), own);
}

TEST(InjectedFailure, AChildThatARankWaitedForIsNoLeak) {
  const WorldReport report = two_ranks([](Rank&) {
    if (::fork() == 0) ::_exit(0);
    ::wait(nullptr);
  });

  EXPECT_TRUE(report.ok()) << report.describe();
}

// ---- teardown (row 16)
// -------------------------------------------------------------------------------------------------

TEST(InjectedFailure, HandlersOfTheProgramsEndDoNotRunInRanks) {
  const WorldReport report = two_ranks([](Rank&) { std::atexit([] { loop_for_ever(); }); });

  EXPECT_TRUE(report.ok()) << report.describe();
}

TEST(InjectedFailure, ARankThatHangsInSuchAHandlerAfterExitIsNamedAtTheDeadline) {
  const WorldReport report = two_ranks(
      [](Rank&) {
        std::atexit([] { loop_for_ever(); });
        std::exit(0);
      },
      kShortDeadline);

  EXPECT_EQ(report.culprit, 1);
  EXPECT_EQ(report.ranks[1].end, RankEnd::kHung);
  EXPECT_THAT(report.cause,
              AllOf(HasSubstr("the deadline of 500 ms passed"), HasSubstr("rank 1 is computing")));
}

// ---- calls that do not fit (rows 11 to 15)
// ----------------------------------------------------------------------------------

struct Mismatch {
  const char* name;
  void (*call)(Communicator& comm, int rank);
  const char* first;
  const char* second;
};

const CallInfo kInfo{.purpose = Purpose::kGradReduce, .axis = Axis::kDp};

void reduce(Communicator& comm, std::int64_t count, Dtype dtype) {
  std::array<std::byte, 1024> data{};
  comm.all_reduce({data.data(), count, dtype}, Reduction::kSum, kInfo).wait();
}

void broadcast(Communicator& comm, int root) {
  std::array<std::byte, 1024> data{};
  comm.broadcast({data.data(), 8, Dtype::kFloat32}, root, kInfo).wait();
}

class MismatchedWorld : public testing::TestWithParam<Mismatch> {};
INSTANTIATE_TEST_SUITE_P(
    Call, MismatchedWorld,
    testing::Values(
        Mismatch{"Op",
                 [](Communicator& comm, int rank) {
                   rank == 1 ? broadcast(comm, 0) : reduce(comm, 8, Dtype::kFloat32);
                 },
                 "rank 0 called all_reduce #1", "rank 1 called broadcast #1"},
        Mismatch{
            "Shape",
            [](Communicator& comm, int rank) { reduce(comm, rank == 1 ? 9 : 8, Dtype::kFloat32); },
            "fp32 x 8", "fp32 x 9"},
        Mismatch{"Dtype",
                 [](Communicator& comm, int rank) {
                   reduce(comm, 8, rank == 1 ? Dtype::kBFloat16 : Dtype::kFloat32);
                 },
                 "fp32 x 8", "bf16 x 8"},
        Mismatch{"Root", [](Communicator& comm, int rank) { broadcast(comm, rank == 1 ? 1 : 0); },
                 "root 0", "root 1"},
        Mismatch{"Group",
                 [](Communicator& comm, int rank) {
                   const auto part = comm.split(rank == 2 ? 1 : 0, rank);
                   reduce(rank == 1 ? *part : comm, 8, Dtype::kFloat32);
                 },
                 "rank 1", "all_reduce"}),
    [](const auto& mismatch) { return mismatch.param.name; });

TEST_P(MismatchedWorld, IsToldByBothSidesLongBeforeTheDeadline) {
  const auto start = std::chrono::steady_clock::now();
  const WorldReport report =
      run_world_report({.size = 3, .name = "mismatch", .deadline = kLongDeadline},
                       [](Rank& rank) { GetParam().call(rank.comm(), rank.rank()); });

  EXPECT_LT(std::chrono::steady_clock::now() - start, kLongDeadline);
  EXPECT_FALSE(report.ok());
  EXPECT_THAT(report.cause, AllOf(HasSubstr(GetParam().first), HasSubstr(GetParam().second)));
  for (const RankReport& rank : report.ranks)
    EXPECT_NE(rank.end, RankEnd::kSignaled) << report.describe();
}

// ---- the controller dies (rows 17, 20)
// --------------------------------------------------------------------------------------

/// Those of MPI belong to tests that run at the same time.
std::set<std::string> shared_files() {
  std::set<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", none)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("vader_segment.")) names.insert(name);
  }
  return names;
}

// Starts worlds without end, and writes a byte to `steps` wherever something has happened.
[[noreturn]] void run_worlds(int steps) {
  for (;;) {
    (void)run_world_report({.size = 2, .deadline = kLongDeadline}, [&](Rank& rank) {
      (void)!::write(steps, "r", 1);
      for (int call = 0; call < 3; ++call) summed(rank, 1);
      (void)!::write(steps, "r", 1);
    });
    (void)!::write(steps, "c", 1);
  }
}

void kill_controllers(int count, unsigned seed) {
  std::mt19937 random(seed);
  become_subreaper();
  const std::set<std::string> shared_before = shared_files();
  for (int i = 0; i < count; ++i) {
    std::array<int, 2> steps{};
    ASSERT_EQ(::pipe(steps.data()), 0);
    const pid_t controller = ::fork();
    if (controller == 0) {
      ::close(steps[0]);
      run_worlds(steps[1]);
    }
    ::close(steps[1]);
    std::array<char, 1> step{};
    for (unsigned to_go = random() % 24; to_go > 0; --to_go)
      ASSERT_EQ(::read(steps[0], step.data(), 1), 1);
    // Not by giving the processor away: on a busy machine that is no short time.
    std::atomic<unsigned> spins{0};
    for (const unsigned end = random() % 200'000; spins < end;)
      spins.fetch_add(1, std::memory_order_relaxed);

    ::kill(controller, SIGKILL);

    EXPECT_EQ(::waitpid(controller, nullptr, 0), controller);
    (void)reap_orphans();  // ends when the last rank has ended; the test's limit bounds it
    while (::read(steps[0], step.data(), 1) > 0) {
    }
    ::close(steps[0]);
  }
  EXPECT_EQ(traces_of_process().children, "");
  for (const std::string& name : shared_files())
    EXPECT_TRUE(shared_before.contains(name)) << "/dev/shm/" << name;
  expect_next_world_runs();
}

TEST(KilledController, LeavesNothingBehindAtFiftyRandomTimes) {
  kill_controllers(50, 17);
}

TEST(KilledControllerOften, LeavesNothingBehindAtAThousandRandomTimes) {
  kill_controllers(1000, 18);
}

// The tracer holds a rank before its first instruction, until its controller is dead.
TEST(KilledController, ARankThatWasForkedButHadNotAskedForASignalEndsItself) {
  become_subreaper();
  const pid_t controller = ::fork();
  if (controller == 0) {
    ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    ::raise(SIGSTOP);
    (void)run_world_report({.size = 2, .deadline = kLongDeadline}, [](Rank&) { loop_for_ever(); });
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(controller, &status, 0), controller);
  ASSERT_EQ(::ptrace(PTRACE_SETOPTIONS, controller, nullptr, PTRACE_O_TRACEFORK), 0);
  while (status >> 8 != (SIGTRAP | PTRACE_EVENT_FORK << 8)) {
    ASSERT_EQ(::ptrace(PTRACE_CONT, controller, nullptr, nullptr), 0);
    ASSERT_EQ(::waitpid(controller, &status, 0), controller);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
  unsigned long rank = 0;
  ASSERT_EQ(::ptrace(PTRACE_GETEVENTMSG, controller, nullptr, &rank), 0);
  ASSERT_EQ(::waitpid(static_cast<pid_t>(rank), &status, __WALL), static_cast<pid_t>(rank));

  ::kill(controller, SIGKILL);

  while (::waitpid(controller, &status, 0) == controller && !WIFSIGNALED(status)) {
  }
  ASSERT_EQ(::ptrace(PTRACE_DETACH, static_cast<pid_t>(rank), nullptr, nullptr), 0);
  ASSERT_EQ(::waitpid(static_cast<pid_t>(rank), &status, __WALL), static_cast<pid_t>(rank));
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

// ---- a rank that nothing ends (row 9)
// ---------------------------------------------------------------------------------------

TEST(UnkillableRank, IsGivenUpAfterABoundWithItsProcessNumber) {
  const ChildResult result = run_in_child([] {
    ForkedWorld world({.size = 2, .name = "unkillable", .deadline = kShortDeadline},
                      [](Rank& rank) {
                        if (rank.rank() == 1) loop_for_ever();
                        summed(rank, 1);
                      });
    // says that it was done, as for a process that is stuck in the kernel
    refuse_system_call(SYS_kill, 0);
    const WorldReport report = world.wait();
    std::puts(report.describe().c_str());
    return report.ranks[1].end == RankEnd::kHung ? 4 : 0;
  });

  EXPECT_EQ(result.exit_code, 4) << result.error;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("rank 1 hung"), HasSubstr("is still there 5 s after SIGKILL"),
                    HasSubstr("process ")));
}

// ---- floods (row 66)
// -------------------------------------------------------------------------------------------------

long peak_kib() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmHWM:")) return std::stol(line.substr(6));
  }
  return -1;
}

// What a rank writes is cut to head and tail, in bounded memory, and no rank waits for long.
void expect_flood_is_cut(int num_blocks, std::size_t line_bytes) {
  const ChildResult result = run_in_child([=] {
    std::ofstream("/proc/self/clear_refs") << "5";  // forget the peak so far
    const long before = peak_kib();
    const WorldReport report = run_world_report({.size = 2, .name = "flood"}, [=](Rank& rank) {
      std::string block(1 << 20, '\0');
      // binary, newlines among it
      for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<char>(i * 7 + (i >> 8));
      const std::string line(line_bytes, 'x');
      const auto put = [](int fd, const std::string& text) {
        for (std::size_t done = 0; done < text.size();) {
          const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
          if (count <= 0) throw std::runtime_error("the pipe is broken");
          done += static_cast<std::size_t>(count);
        }
      };
      put(STDOUT_FILENO, fmt::format("begin of rank {}", rank.rank()));
      for (int i = 0; i < num_blocks >> (4 * rank.rank()); ++i) put(STDOUT_FILENO, block);
      put(STDERR_FILENO, line);
      put(STDERR_FILENO, fmt::format("end of rank {}", rank.rank()));
      EXPECT_EQ(summed(rank, 1), 2);
    });
    const RankReport& rank = report.ranks[0];
    const bool is_cut = report.ok() && rank.standard_output.starts_with("begin of rank 0") &&
                        rank.standard_error.ends_with("end of rank 0") &&
                        rank.standard_output.size() < (1 << 18) &&
                        rank.standard_error.size() < (1 << 18);
    std::printf("grew by %ld KiB\n%s", peak_kib() - before, report.describe().c_str());
    return is_cut && peak_kib() - before < 50 * 1024 ? 0 : 1;
  });

  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
}

TEST(InjectedFailure, AFloodOfOutputIsCutInBoundedMemory) {
  expect_flood_is_cut(64, std::size_t{16} << 20);
}

TEST(FloodOfOutput, OfAGigabyteAndALineOf100MegabytesIsCutInBoundedMemory) {
  expect_flood_is_cut(1024, std::size_t{100} << 20);
}

// ---- interruptions (row 18)
// -------------------------------------------------------------------------------------------------

TEST(InjectedFailure, ASignalEndsAProgramAtOnceThatHasNothingToKeep) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const ChildResult at_once = run_in_child([&] {
      install_interrupt_handler();  // what this program itself keeps is forgotten
      ::raise(signal);
      return 0;
    });
    const ChildResult later = run_in_child([&] {
      install_interrupt_handler();  // what this program itself keeps is forgotten
      const KeepResults keep;
      ::raise(signal);
      return interrupt_signal() == signal ? 0 : 1;
    });

    EXPECT_EQ(at_once.exit_code, 128 + signal);
    EXPECT_THAT(at_once.error, HasSubstr("isoshard: interrupted"));
    EXPECT_EQ(later.exit_code, 0);
  }
}

// ---- test programs (rows 62, 68; JUnit)
// -------------------------------------------------------------------------------------

// For the test below, which starts this program once more.
TEST(InjectedFailure, DISABLED_ARankOfThisTestCrashes) {
  run_world(2, [](Rank& rank) {
    summed(rank, 1);
    if (rank.rank() == 1) ::raise(SIGSEGV);
    summed(rank, 1);
  });
}
TEST(InjectedFailure, DISABLED_ThisOneComesAfterIt) {
  expect_next_world_runs();
}

ChildResult this_program(const std::vector<std::string>& arguments, const char* variable = nullptr,
                         const char* value = "") {
  return run_in_child([&] {
    if (variable != nullptr) ::setenv(variable, value, 1);
    ::unsetenv("ISOSHARD_WORLD_SIZES");
    std::vector<char*> argv = {const_cast<char*>("test")};
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    ::execv("/proc/self/exe", argv.data());
    return 98;
  });
}

TEST(InjectedFailure, AProgramWhoseSuitesAreNotThoseOfItsEntriesFails) {
  for (const char* const listed : {"", "InjectedFailure", "InjectedFailure,NoSuch"}) {
    const ChildResult result = this_program({"--gtest_filter=InjectedFailure.DISABLED_*"},
                                            "ISOSHARD_LISTED_SUITES", listed);
    EXPECT_EQ(result.exit_code, 3) << listed;
    EXPECT_THAT(result.error, testing::HasSubstr("must be its suites: not listed: '")) << listed;
  }
}

TEST(InjectedFailure, AProgramWhoseRankCrashesStillWritesItsXml) {
  const TestFolder folder;
  const std::filesystem::path xml = folder / "junit.xml";

  const ChildResult result =
      this_program({"--gtest_also_run_disabled_tests", "--gtest_filter=InjectedFailure.DISABLED_*",
                    "--gtest_output=xml:" + xml.string()});

  EXPECT_EQ(result.exit_code, 1);
  const std::string report = content_of(xml);
  EXPECT_THAT(report, HasSubstr("tests=\"2\" failures=\"1\""));
  EXPECT_THAT(report, HasSubstr("rank 1 killed by SIGSEGV after all_reduce #1"));
  EXPECT_THAT(report, HasSubstr("testcase name=\"DISABLED_ThisOneComesAfterIt\""));
}

TEST(InjectedFailure, VariablesThatWouldLeaveTestsOutAreRefused) {
  for (const auto& [name, value] :
       {std::pair{"GTEST_LIST_TESTS", "1"}, std::pair{"GTEST_REPEAT", "0"},
        std::pair{"GTEST_TOTAL_SHARDS", "4"}}) {
    const ChildResult result = this_program({"--gtest_filter=Frames.*"}, name, value);

    EXPECT_EQ(result.exit_code, 2) << name;
    EXPECT_THAT(result.error, HasSubstr(name));
  }
}

}  // namespace
}  // namespace isoshard
