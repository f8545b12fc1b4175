// SPDX-License-Identifier: Apache-2.0
/// Each way a rank can fail, for real: one clear cause that names the rank, nothing left behind,
/// and the next world runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "conformance/world/deadlines.h"
#include "core/base/error.h"
#include "core/comm/communicator.h"
#include "harness/testing/run_world.h"
#include "harness/testing/test_child.h"
#include "harness/world/forked/frames.h"
#include "suite/testing/world_probes.h"

namespace isoshard {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ForkedWorldFailure : public ::testing::Test {
 protected:
  void SetUp() override {
    (void)run_world_report({.size = 1}, [](Rank&) {});
  }  // what the first world keeps open stays

  // Runs two ranks, of which `bad` runs on rank 1 after one collective and both meet in a second
  // one.
  WorldReport run_bad(const ForkedWorld::Body& bad,
                      std::chrono::milliseconds deadline = kLongDeadline) {
    before_ = traces_of_process();
    const auto start = std::chrono::steady_clock::now();
    WorldReport report =
        run_world_report({.size = 2, .name = "bad", .deadline = deadline}, [&](Rank& rank) {
          summed(rank, 1);
          rank.set_phase("middle");
          if (rank.rank() == 1) bad(rank);
          summed(rank, 2);
        });
    came_before_deadline_ = std::chrono::steady_clock::now() - start < kLongDeadline;
    return report;
  }

  void TearDown() override {
    EXPECT_TRUE(came_before_deadline_);
    EXPECT_EQ(traces_of_process(), before_) << "a descriptor or a process is left";
    const WorldReport next = run_world_report({.size = 2, .name = "next"},
                                              [](Rank& rank) { EXPECT_EQ(summed(rank, 1), 2); });
    EXPECT_TRUE(next.ok()) << next.describe();
  }

  static void expect_culprit_is_rank_1(const WorldReport& report, RankEnd end,
                                       const std::string& cause) {
    ASSERT_EQ(report.ranks.size(), 2U);
    EXPECT_FALSE(report.ok());
    EXPECT_EQ(report.culprit, 1);
    EXPECT_EQ(report.ranks[1].end, end) << report.describe();
    EXPECT_THAT(report.cause, HasSubstr(cause));
    EXPECT_THAT(report.describe(), HasSubstr("world bad of 2 ranks: "));
    EXPECT_EQ(report.ranks[0].end, RankEnd::kReleased) << report.describe();
    EXPECT_THAT(report.ranks[0].message, HasSubstr("rank 1"));
    // released, not killed after a grace
    EXPECT_THAT(report.ranks[0].message, Not(HasSubstr("stopped by the controller")));
  }

 private:
  Traces before_ = traces_of_process();
  bool came_before_deadline_ = true;
};

TEST_F(ForkedWorldFailure, RankThrows) {
  const WorldReport report = run_bad([](Rank&) { throw std::runtime_error("boom"); });

  expect_culprit_is_rank_1(report, RankEnd::kThrew, "rank 1 threw after all_reduce #1");
  EXPECT_THAT(report.cause, HasSubstr("phase middle: std::runtime_error: boom"));
  EXPECT_THROW(require_ok(report), InfrastructureError);
}

TEST_F(ForkedWorldFailure, RankThrowsWhatIsNoException) {
  const WorldReport report = run_bad([](Rank&) { throw 42; });

  expect_culprit_is_rank_1(report, RankEnd::kThrew, "int");
}

TEST_F(ForkedWorldFailure, HelperThreadThrows) {
  const WorldReport report =
      run_bad([](Rank&) { std::thread([] { throw std::runtime_error("in a thread"); }).join(); });

  expect_culprit_is_rank_1(report, RankEnd::kSignaled, "rank 1 killed by SIGABRT");
  EXPECT_THAT(report.ranks[1].message, HasSubstr("in a thread"));
}

TEST_F(ForkedWorldFailure, RankAborts) {
  const WorldReport report = run_bad([](Rank&) { std::abort(); });

  expect_culprit_is_rank_1(report, RankEnd::kSignaled,
                           "rank 1 killed by SIGABRT after all_reduce #1");
  EXPECT_EQ(report.ranks[1].code, SIGABRT);
  EXPECT_THAT(report.ranks[1].message, HasSubstr("abort"));  // the backtrace
}

TEST_F(ForkedWorldFailure, RankSegfaults) {
  const WorldReport report = run_bad([](Rank&) {
    std::puts("last line before the crash");
    volatile int* nothing = nullptr;
    *nothing = 1;
  });

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // the sanitizer reports and exits
  expect_culprit_is_rank_1(report, RankEnd::kExited, "rank 1 exited");
#else
  expect_culprit_is_rank_1(report, RankEnd::kSignaled, "rank 1 killed by SIGSEGV");
  EXPECT_THAT(report.ranks[1].message, HasSubstr("backtrace of rank 1, SEGV"));
#endif
  EXPECT_THAT(report.describe(), HasSubstr("last line before the crash"));
}

// The state letter of a thread of this process: S once it sleeps.
char state_of_thread(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t end = line.rfind(')');
  return end == std::string::npos ? '?' : line[end + 2];
}

TEST_F(ForkedWorldFailure, RankIsKilledInACollective) {
  const WorldReport report =
      run_world_report({.size = 2, .name = "bad", .deadline = kLongDeadline}, [](Rank& rank) {
        std::array<std::byte, 4096> data{};
        std::atomic<bool> is_calling{false};
        const auto second_call = [&] {
          rank.comm()
              .all_reduce({data.data(), 1024, Dtype::kFloat32}, Reduction::kSum,
                          {Purpose::kGradReduce, Axis::kDp})
              .wait();
        };
        const auto pid_of_rank_1 =
            static_cast<pid_t>(summed(rank, rank.rank() == 1 ? ::getpid() : 0));
        rank.set_phase("backward");
        if (rank.rank() == 0) {
          // so rank 1 waits in its second call until it is dead
          while (::kill(pid_of_rank_1, 0) == 0) ::sched_yield();
        } else {
          std::thread([&is_calling, thread = ::gettid()] {
            while (!is_calling || state_of_thread(thread) != 'S') ::sched_yield();
            ::kill(::getpid(), SIGKILL);
          }).detach();
          is_calling = true;
        }
        second_call();
      });

  expect_culprit_is_rank_1(report, RankEnd::kSignaled,
                           "rank 1 killed by SIGKILL in all_reduce #2 (grad_reduce, dp, sum, fp32 "
                           "x 1024), phase backward");
  EXPECT_EQ(report.ranks[1].code, SIGKILL);
  EXPECT_THAT(report.ranks[1].message, HasSubstr("its peak was"));
}

TEST_F(ForkedWorldFailure, RankExitsEarly) {
  for (const bool runs_handlers : {true, false}) {
    const WorldReport report = run_bad([&](Rank&) { runs_handlers ? std::exit(0) : ::_exit(0); });

    expect_culprit_is_rank_1(report, RankEnd::kExited,
                             "rank 1 exited with status 0 before its body returned");
  }
}

TEST_F(ForkedWorldFailure, RankExitsAfterItsResultButBeforeItsGoodbye) {
  const WorldReport report = run_bad([](Rank& rank) {
    rank.post_result(std::as_bytes(std::span("pass")));
    ::_exit(0);
  });

  expect_culprit_is_rank_1(report, RankEnd::kExited, "although it had posted a result");
}

TEST_F(ForkedWorldFailure, RankLoopsForEverAndIgnoresSigterm) {
  const WorldReport report = run_bad(
      [](Rank&) {
        ::signal(SIGTERM, SIG_IGN);
        loop_for_ever();
      },
      kShortDeadline);

  expect_culprit_is_rank_1(report, RankEnd::kHung,
                           "the deadline of 500 ms passed: rank 1 has not entered all_reduce #2");
  EXPECT_THAT(report.cause, HasSubstr("rank 0 waits in it"));
  EXPECT_THAT(report.ranks[1].message, HasSubstr("backtrace of rank 1, at the deadline"));
}

TEST_F(ForkedWorldFailure, RankIsStopped) {
  const WorldReport report = run_bad([](Rank&) { ::raise(SIGSTOP); }, kShortDeadline);

  expect_culprit_is_rank_1(report, RankEnd::kHung, "rank 1 has not entered all_reduce #2");
  EXPECT_THAT(report.cause, HasSubstr("rank 1 is stopped (SIGSTOP)"));
}

TEST_F(ForkedWorldFailure, RankSkipsACollective) {
  const WorldReport report =
      run_world_report({.size = 3, .name = "skips", .deadline = kLongDeadline}, [](Rank& rank) {
        summed(rank, 1);
        if (rank.rank() != 1) summed(rank, 2);
      });

  EXPECT_EQ(report.culprit, 1);
  EXPECT_EQ(report.ranks[1].end, RankEnd::kReturned);
  EXPECT_THAT(report.cause, HasSubstr("rank 1 has not entered all_reduce #2"));
  EXPECT_THAT(report.cause, HasSubstr("ranks 0, 2 wait in it"));
  for (const int rank : {0, 2})
    EXPECT_EQ(report.ranks[static_cast<std::size_t>(rank)].end, RankEnd::kReleased)
        << report.describe();
}

TEST_F(ForkedWorldFailure, MismatchedCallsNameBothSides) {
  const WorldReport report = run_bad([](Rank& rank) {
    rank.comm().barrier({Purpose::kSetup, Axis::kWorld});
  });

  EXPECT_FALSE(report.ok());
  EXPECT_THAT(report.cause, HasSubstr("barrier"));
  EXPECT_THAT(report.cause, HasSubstr("all_reduce"));
}

TEST_F(ForkedWorldFailure, RankSendsGarbageOnItsChannel) {
  const WorldReport report = run_bad([](Rank&) {
    for (int fd = 3; fd < 1024; ++fd) {
      struct stat state {};
      if (::fstat(fd, &state) != 0 || !S_ISSOCK(state.st_mode)) continue;
      const std::array<std::uint64_t, 2> header{static_cast<std::uint64_t>(FrameType::kResultPart),
                                                std::uint64_t{1} << 63};
      ASSERT_EQ(::write(fd, header.data(), sizeof(header)), static_cast<ssize_t>(sizeof(header)));
    }
    loop_for_ever();
  });

  expect_culprit_is_rank_1(report, RankEnd::kProtocol, "claims 9223372036854775808 bytes");
}

TEST_F(ForkedWorldFailure, RankHangsInTeardown) {
  const WorldReport report =
      run_world_report({.size = 2, .name = "teardown", .deadline = kShortDeadline}, [](Rank& rank) {
        detail::post_value(rank, rank.rank());
        // A stream that can never be flushed: the other end of the pipe is never read.
        std::array<int, 2> pipe{};
        ASSERT_EQ(::pipe(pipe.data()), 0);
        if (rank.rank() == 1) {
          static std::vector<char> buffer(1 << 20);
          std::FILE* stream = ::fdopen(pipe[1], "w");
          std::setvbuf(stream, buffer.data(), _IOFBF, buffer.size());
          for (int i = 0; i < 500'000; ++i) std::fputc('x', stream);
        }
      });

  EXPECT_EQ(report.culprit, 1);
  EXPECT_EQ(report.ranks[1].end, RankEnd::kHung);
  EXPECT_THAT(report.ranks[1].message, HasSubstr("its body had returned, it hung in teardown"));
  EXPECT_EQ(detail::value_of<int>(report.ranks[1].result), 1);
}

// ---- around the ranks
// -------------------------------------------------------------------------------------------------

// Runs `body` in a child of this process and gives back what it returned.
std::string in_child(const std::function<std::string()>& body) {
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) return "no pipe";
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = error.what();
    }
    (void)!::write(pipe[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::string text;
  std::array<char, 4096> buffer{};
  for (ssize_t count = 0; (count = ::read(pipe[0], buffer.data(), buffer.size())) > 0;)
    text.append(buffer.data(), static_cast<std::size_t>(count));
  ::close(pipe[0]);
  ::waitpid(pid, nullptr, 0);
  return text;
}

std::string start_world_under(const std::function<void()>& set_limit) {
  return in_child([&] {
    set_limit();
    const Traces before = traces_of_process();
    try {
      (void)run_world_report({.size = 8}, [](Rank&) {});
    } catch (const InfrastructureError& error) {
      return (traces_of_process() == before ? "clean: " : "left something: ") +
             std::string(error.what());
    }
    return std::string("started");
  });
}

TEST_F(ForkedWorldFailure, TooFewDescriptorsNameTheLimit) {
  const std::string outcome = start_world_under([] {
    const rlimit limit{24, 24};
    ::setrlimit(RLIMIT_NOFILE, &limit);
  });

  EXPECT_THAT(outcome, StartsWith("clean: "));
  EXPECT_THAT(outcome, HasSubstr("RLIMIT_NOFILE (ulimit -n) is 24"));
}

TEST_F(ForkedWorldFailure, TooFewProcessesNameTheLimit) {
  const std::string outcome = start_world_under([] {
    // root is exempt, and another user's processes would count
    constexpr uid_t kUnusedUser = 54'321;
    if (::getuid() == 0) (void)!::setresuid(kUnusedUser, kUnusedUser, kUnusedUser);
    const rlimit limit{3, 3};
    ::setrlimit(RLIMIT_NPROC, &limit);
  });

  EXPECT_THAT(outcome, StartsWith("clean: "));
  EXPECT_THAT(outcome, HasSubstr("RLIMIT_NPROC (ulimit -u) is 3"));
}

// The write end of a pipe lives in every rank and in the controller: it is at its end only when all
// of them are gone.
TEST_F(ForkedWorldFailure, RanksDieWithTheirController) {
  std::array<int, 2> alive{};
  ASSERT_EQ(::pipe(alive.data()), 0);
  const pid_t controller = ::fork();
  if (controller == 0) {
    ::close(alive[0]);
    (void)run_world_report({.size = 2, .deadline = kLongDeadline}, [&](Rank& rank) {
      summed(rank, 1);
      (void)!::write(alive[1], "r", 1);
      loop_for_ever();
    });
    ::_exit(0);
  }
  ::close(alive[1]);
  std::array<char, 2> started{};
  for (int count = 0; count < 2;) count += static_cast<int>(::read(alive[0], started.data(), 1));

  ::kill(controller, SIGKILL);

  ::waitpid(controller, nullptr, 0);
  // blocks until the last rank is gone; the test's limit bounds it
  EXPECT_EQ(::read(alive[0], started.data(), 1), 0);
  // which this process has inherited: the worlds before made it a subreaper
  (void)reap_orphans();
  ::close(alive[0]);
}

TEST_F(ForkedWorldFailure, InterruptedRunStopsRanksAndSaysSo) {
  const std::string outcome = in_child([] {
    const WorldReport report =
        run_world_report({.size = 2, .name = "bad", .deadline = kLongDeadline}, [](Rank& rank) {
          summed(rank, 1);
          if (rank.rank() == 0) ::kill(::getppid(), SIGINT);
          loop_for_ever();
        });
    return std::to_string(report.interrupted) + " " + report.cause + " " +
           traces_of_process().children;
  });

  EXPECT_EQ(outcome, "1 interrupted by SIGINT ");
}

// Runs `body` in a child of this process and gives back its wait status.
int status_of_child(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

TEST_F(ForkedWorldFailure, SecondSignalEndsTheProgramAtOnce) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const int status = status_of_child([&] {
      ::raise(signal);
      ::raise(signal);
    });

    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 128 + signal);
  }
}

TEST_F(ForkedWorldFailure, ATestProgramThatRunsNoTestFails) {
  const int status = status_of_child([] {
    (void)!std::freopen("/dev/null", "w", stdout);
    (void)!std::freopen("/dev/null", "w", stderr);
    ::execl("/proc/self/exe", "test", "--gtest_filter=NoSuchSuite.*", nullptr);
  });

  EXPECT_EQ(WEXITSTATUS(status), 2);
}

TEST_F(ForkedWorldFailure, SeveralThreadsAreRefusedBeforeAFork) {
  std::atomic<bool> may_end{false};
  std::thread helper([&] { may_end.wait(false); });

  EXPECT_THROW(run_world_report({.size = 2}, [](Rank&) {}), UsageError);

  may_end = true;
  may_end.notify_one();
  helper.join();
}

}  // namespace
}  // namespace isoshard
