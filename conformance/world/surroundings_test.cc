// SPDX-License-Identifier: Apache-2.0
/// What a world does to the program around it, and the program and its host to a world: other
/// children, deadlines, pauses, files that change.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "harness/testing/run_world.h"
#include "harness/testing/test_child.h"
#include "harness/testing/test_folder.h"
#include "suite/testing/world_probes.h"

namespace isoshard {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

void compute_for(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

// ---- the program around a world
// -------------------------------------------------------------------------------------------------

bool adopts_orphans() {
  int adopts = 0;
  ::prctl(PR_GET_CHILD_SUBREAPER, &adopts);
  return adopts != 0;
}

TEST(WorldSurroundings, AChildThatTheProgramStartsWhileAWorldRunsIsLeftAlone) {
  ForkedWorld world({.size = 2}, [](Rank& rank) {
    summed(rank, 1);
    if (rank.rank() == 1) ::raise(SIGKILL);
    summed(rank, 1);
  });
  const pid_t own = ::fork();
  if (own == 0) loop_for_ever();
  const pid_t ended = ::fork();
  if (ended == 0) ::_exit(7);

  const WorldReport report = world.wait();

  EXPECT_EQ(report.culprit, 1);
  EXPECT_THAT(report.cause, Not(HasSubstr("left behind")));
  EXPECT_EQ(::waitpid(own, nullptr, WNOHANG), 0) << "it still runs";
  int status = 0;
  EXPECT_EQ(::waitpid(ended, &status, 0), ended) << "its status is the program's to fetch";
  EXPECT_EQ(WEXITSTATUS(status), 7);
  ::kill(own, SIGKILL);
  ::waitpid(own, nullptr, 0);
}

TEST(WorldSurroundings, TheProgramAdoptsOrphansAfterwardsOnlyIfItDidBefore) {
  for (const bool before : {false, true}) {
    const ChildResult result = run_in_child([&] {
      ::prctl(PR_SET_CHILD_SUBREAPER, before ? 1 : 0);
      {
        const ForkedWorld first({.size = 2}, [](Rank& rank) { summed(rank, 1); });
        const WorldReport second = run_forked({.size = 2}, [](Rank& rank) { summed(rank, 1); });
        if (!second.ok() || !adopts_orphans()) return 1;  // the first one runs
      }
      return adopts_orphans() == before ? 0 : 2;
    });

    EXPECT_EQ(result.exit_code, 0) << before << result.error;
  }
}

// The daemon shares the tensor of its rank, and writes to it until the world ends; another world
// that were given this memory would see it.
TEST(WorldSurroundings, MemoryOfACrashedRankIsFreeWhenWhatItStartedHasEnded) {
  constexpr std::int64_t kBytes = std::int64_t{16} << 20;
  auto* const started = static_cast<std::atomic<int>*>(
      ::mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ForkedWorld crashing({.size = 2, .name = "crashing"}, [&](Rank& rank) {
    summed(rank, 1);
    if (rank.rank() == 1) {
      const at::Tensor tensor = at::zeros({kBytes}, at::kByte);
      if (::fork() == 0) {
        for (;; *started = 1) std::memset(tensor.data_ptr(), 7, kBytes);
      }
      while (*started == 0) ::sched_yield();
      ::raise(SIGKILL);
    }
    compute_for(1500ms);
  });
  ForkedWorld other({.size = 1, .name = "other"}, [&](Rank&) {
    while (*started == 0) ::sched_yield();
    const auto end = std::chrono::steady_clock::now() + 1200ms;
    while (std::chrono::steady_clock::now() < end) {
      const at::Tensor own = at::full({kBytes}, 1, at::kByte);
      compute_for(10ms);
      if (!own.eq(1).all().item<bool>()) throw std::runtime_error("somebody wrote to it");
    }
  });

  const WorldReport undisturbed = other.wait(), crashed = crashing.wait();

  EXPECT_TRUE(undisturbed.ok()) << undisturbed.describe();
  EXPECT_THAT(crashed.cause, HasSubstr("processes that its ranks had left behind were killed"));
  ::munmap(started, sizeof(int));
}

// The kernel hands the end of a thread on to what it has forked.
TEST(WorldSurroundings, AWorldOutlivesTheThreadThatMadeIt) {
  const ChildResult result = run_in_child([] {
    std::array<int, 2> go{};
    if (::pipe(go.data()) != 0) return 3;
    // without a /proc the threads of a process are not counted, and a second one is not refused
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", "/proc", "tmpfs", 0, nullptr) != 0)
      return 4;
    std::unique_ptr<ForkedWorld> world;
    std::thread([&] {
      world = std::make_unique<ForkedWorld>(WorldOptions{.size = 2}, [&](Rank& rank) {
        char byte = 0;
        if (::read(go[0], &byte, 1) != 1) throw std::runtime_error("no byte");
        summed(rank, 1);
      });
    }).join();
    if (::write(go[1], "ab", 2) != 2) return 5;
    const WorldReport report = world->wait();
    std::fputs(report.describe().c_str(), stderr);
    return report.ok() ? 0 : 1;
  });

  if (result.exit_code == 4) GTEST_SKIP() << "needs the privilege to mount";
  EXPECT_EQ(result.exit_code, 0) << result.error;
}

TEST(WorldSurroundings, ARankThatIsStoppedAndDeafEndsWithItsController) {
  become_subreaper();
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t controller = ::fork();
  if (controller == 0) {
    ::close(pipe[0]);
    (void)run_forked({.size = 2}, [&](Rank&) {
      sigset_t all;
      ::sigfillset(&all);
      ::sigprocmask(SIG_BLOCK, &all, nullptr);
      (void)!::write(pipe[1], "r", 1);
      ::raise(SIGSTOP);
    });
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::array<char, 1> byte{};
  ASSERT_EQ(::read(pipe[0], byte.data(), 1), 1);
  ASSERT_EQ(::read(pipe[0], byte.data(), 1), 1);

  ::kill(controller, SIGKILL);

  EXPECT_EQ(::waitpid(controller, nullptr, 0), controller);
  (void)reap_orphans();  // ends when the last rank has ended; the test's limit bounds it
  EXPECT_EQ(::read(pipe[0], byte.data(), 1), 0);
  ::close(pipe[0]);
}

// ---- deadlines
// -------------------------------------------------------------------------------------------------

TEST(WorldDeadline, BeginsAnewWithEveryCollectiveAndPhase) {
  const WorldReport report =
      run_world_report({.size = 2, .name = "long", .deadline = 1500ms}, [](Rank& rank) {
        EXPECT_EQ(rank.size(), 2);
        for (int step = 0; step < 6; ++step) {
          if (rank.rank() == 0) compute_for(250ms);
          summed(rank, 1);
          rank.set_phase(std::to_string(step));
          if (rank.rank() == 1) compute_for(250ms);
        }
      });

  EXPECT_TRUE(report.ok()) << report.describe();
}

TEST(WorldDeadline, OfALoopWithoutProgressIsKept) {
  const auto begin = std::chrono::steady_clock::now();
  const WorldReport report =
      run_world_report({.size = 2, .name = "loop", .deadline = 500ms}, [](Rank& rank) {
        summed(rank, 1);
        if (rank.rank() == 1) loop_for_ever();
        summed(rank, 1);
      });

  EXPECT_THAT(report.cause, HasSubstr("the deadline of 500 ms passed: rank 1 has not entered"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

bool sleeps(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string line(std::istreambuf_iterator<char>(file), {});
  return line.find(") S ") != std::string::npos;
}

// The whole host, as a suspended container or Ctrl-Z stops it, for longer than the deadline.
TEST(SuspendedHost, IsSlowAndNotHung) {
  std::array<int, 2> ready{}, go{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  ASSERT_EQ(::pipe(go.data()), 0);
  const pid_t program = ::fork();
  if (program == 0) {
    ::setpgid(0, 0);
    const WorldReport report =
        run_forked({.size = 2, .name = "stopped", .deadline = 1000ms}, [&](Rank& rank) {
          summed(rank, 1);
          char byte = 'r';
          if (::write(ready[1], &byte, 1) != 1 || ::read(go[0], &byte, 1) != 1)
            throw std::runtime_error("no byte");
          summed(rank, 1);
        });
    ::_exit(!report.ok() ? 1 : report.host_pause >= 1000ms ? 0 : 2);
  }
  std::array<char, 2> bytes{};
  for (int rank = 0; rank < 2; ++rank) ASSERT_EQ(::read(ready[0], bytes.data(), 1), 1);

  // Nobody watches ranks before the controller waits for them.
  while (!sleeps(program)) {
    ASSERT_EQ(::waitpid(program, nullptr, WNOHANG), 0) << "the program ended";
    ::sched_yield();
  }
  ::kill(-program, SIGSTOP);
  (void)::poll(nullptr, 0, 2500);  // what is tested is that time passes
  ::kill(-program, SIGCONT);
  ASSERT_EQ(::write(go[1], "gg", 2), 2);

  int status = 0;
  ASSERT_EQ(::waitpid(program, &status, 0), program);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  for (const int fd : {ready[0], ready[1], go[0], go[1]}) ::close(fd);
}

// ---- files
// -------------------------------------------------------------------------------------------------

TEST(WorldFiles, AFileErrorOfARankIsAFileErrorOfTheProgram) {
  const WorldReport report = run_forked({.size = 2, .name = "file"}, [](Rank& rank) {
    summed(rank, 1);
    if (rank.rank() == 1) throw FileError("weights: are no weights");
    summed(rank, 1);
  });

  EXPECT_EQ(report.culprit, 1);
  EXPECT_EQ(report.file_error, "weights: are no weights");
  EXPECT_THROW(require_ok(report), FileError);
}

TEST(WorldFiles, AnInputThatShrinksUnderARankIsTold) {
  const TestFolder folder;
  write_file_atomically(folder / "w", std::string(std::size_t{3} << 20, 'x'));
  const MappedFile mapped(folder / "w");  // as weights are: opened before the ranks

  const WorldReport report = run_forked({.size = 2, .name = "shrinks"}, [&](Rank& rank) {
    if (rank.rank() == 0) std::filesystem::resize_file(folder / "w", 10);
    summed(rank, 1);
    (void)*const_cast<const volatile std::byte*>(&mapped.bytes().back());
    summed(rank, 1);
  });

  EXPECT_THAT(report.file_error, HasSubstr("w: changed while reading: it had 3145728 bytes"));
  EXPECT_EQ(report.ranks[1].code, 0) << "no signal";
  EXPECT_THROW(require_ok(report), FileError);
}

}  // namespace
}  // namespace isoshard
