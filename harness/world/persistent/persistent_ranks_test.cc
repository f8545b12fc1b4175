// SPDX-License-Identifier: Apache-2.0
// Claims about ranks that live for a whole program: who they are, how they meet, and their ends.
#include "harness/world/persistent/persistent_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>

#include "core/base/error.h"
#include "core/comm/nccl/nccl_world.h"
#include "core/comm/tcp/tcp_endpoint.h"

namespace isoshard {
namespace {

using namespace std::chrono_literals;

std::vector<int> codes(const std::vector<PersistentRank>& ranks) {
  std::vector<int> result;
  for (const PersistentRank& rank : ranks) result.push_back(rank.code);
  return result;
}

RankVariables own_variables() {
  return read_rank_variables([](const char* name) { return std::getenv(name); });
}

TEST(PersistentRanks, KnowWhoTheyAreWhateverTheCallersVariablesSay) {
  ::setenv("OMPI_COMM_WORLD_RANK", "5", 1);
  ::setenv("OMPI_COMM_WORLD_SIZE", "9", 1);
  const auto ranks = run_persistent_ranks(3, [] {
    const RankVariables own = own_variables();
    const bool is_right = own.size == 3 && own.local_size == 3 && own.local_rank == own.rank &&
                          own.launcher == "torchrun" && own.address == "127.0.0.1";
    return is_right ? 10 + own.rank : 1;
  });
  ::unsetenv("OMPI_COMM_WORLD_RANK");
  ::unsetenv("OMPI_COMM_WORLD_SIZE");

  EXPECT_EQ(codes(ranks), (std::vector<int>{10, 11, 12}));
  EXPECT_EQ(std::getenv("MASTER_PORT"), nullptr) << "the caller's variables are its own";
}

// Two jobs at once have two ports.
TEST(PersistentRanks, MeetAsAJobAndAgree) {
  const auto ranks = run_persistent_ranks(3, [] {
    const RankVariables own = own_variables();
    const auto job = meet_at(own, std::chrono::steady_clock::now() + 30s);
    TcpEndpoint agreement(job, ReductionOrder::kOrdered);
    return static_cast<int>(agreement.gather_journals(static_cast<std::uint64_t>(7 + own.rank)));
  });

  EXPECT_EQ(codes(ranks), (std::vector<int>{9, 9, 9}));
}

TEST(PersistentRanks, ThatDieAreReportedAndTheOthersComeToTheirEnd) {
  const auto ranks = run_persistent_ranks(3, [] {
    if (own_variables().rank == 1) ::raise(SIGKILL);
    return 3;
  });

  ASSERT_EQ(ranks.size(), 3U);
  EXPECT_EQ(ranks[1].signal, SIGKILL);
  EXPECT_EQ(ranks[0].signal, 0);
  EXPECT_EQ(ranks[2].code, 3);
}

// As one that waits for the others to meet.
TEST(PersistentRanks, ThatOutliveOneThatDiedAreEnded) {
  const auto ranks = run_persistent_ranks(
      2,
      [] {
        if (own_variables().rank == 1) ::raise(SIGKILL);
        std::signal(SIGTERM, SIG_IGN);
        for (;;) ::pause();
        return 0;
      },
      100ms);

  EXPECT_EQ(ranks[0].signal, SIGKILL);
  EXPECT_EQ(ranks[1].signal, SIGKILL);
}

// As a GPU that one of them cannot use: nobody else waits for it without end.
TEST(PersistentRanks, ThatOutliveOneThatThrewAreToldToEnd) {
  for (const int broken : {0, 1}) {
    const auto ranks = run_persistent_ranks(
        2,
        [broken] {
          if (own_variables().rank == broken) throw InfrastructureError("no GPU");
          (void)meet_at(own_variables());
          return 0;
        },
        100ms);

    const auto& other = ranks[static_cast<std::size_t>(1 - broken)];
    const auto& first = ranks[static_cast<std::size_t>(broken)];
    EXPECT_EQ(first.code, 4);
    EXPECT_FALSE(first.was_told);
    EXPECT_TRUE(other.signal != 0 || other.code != 0);
  }
}

// Whoever starts the program may ignore the ends of its own children, which is handed on.
TEST(PersistentRanks, KeepTheirCodesWhereTheEndsOfChildrenAreIgnored) {
  struct sigaction ignored {
  }, before{}, after{};
  ignored.sa_handler = SIG_IGN;
  ::sigaction(SIGCHLD, &ignored, &before);
  const auto ranks = run_persistent_ranks(2, [] { return own_variables().rank; });
  ::sigaction(SIGCHLD, &before, &after);

  EXPECT_EQ(codes(ranks), (std::vector<int>{0, 1}));
  EXPECT_EQ(after.sa_handler, SIG_IGN) << "the caller's way is its own again";
}

TEST(PersistentRanks, LiveOnWhereTheirCallerIgnoresASignal) {
  struct sigaction ignored {
  }, before{};
  ignored.sa_handler = SIG_IGN;
  ::sigaction(SIGHUP, &ignored, &before);
  const pid_t controller = ::getpid();
  const auto ranks = run_persistent_ranks(2, [controller] {
    ::kill(controller, SIGHUP);
    ::kill(::getpid(), SIGHUP);
    return 0;
  });
  ::sigaction(SIGHUP, &before, nullptr);

  EXPECT_EQ(codes(ranks), (std::vector<int>{0, 0}));
}

TEST(PersistentRanks, GetTheSignalsOfTheirController) {
  const pid_t controller = ::getpid();
  void* const shared = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const num_waiting = new (shared) std::atomic<int>(0);
  const auto ranks = run_persistent_ranks(2, [controller, num_waiting] {
    // both wait for it, and then one asks for it
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGTERM);
    ::sigprocmask(SIG_BLOCK, &waited, nullptr);
    num_waiting->fetch_add(1);
    if (own_variables().rank == 1) {
      while (num_waiting->load() < 2) ::sched_yield();
      ::kill(controller, SIGTERM);
    }
    int signal = 0;
    return ::sigwait(&waited, &signal) == 0 && signal == SIGTERM ? 42 : 1;
  });
  ::munmap(shared, sizeof(std::atomic<int>));

  EXPECT_EQ(codes(ranks), (std::vector<int>{42, 42}));
  for (const PersistentRank& rank : ranks) EXPECT_FALSE(rank.was_told);
}

// A signal that comes while ranks are started goes to those that start later, too.
TEST(PersistentRanks, GetASignalThatCameBeforeTheyWereThere) {
  struct sigaction usual {
  }, before{};
  usual.sa_handler = SIG_DFL;
  ::sigaction(SIGTERM, &usual, &before);
  const pid_t controller = ::getpid();
  const auto ranks = run_persistent_ranks(3, [controller] {
    if (own_variables().rank == 0) ::kill(controller, SIGTERM);
    for (;;) ::pause();
    return 0;
  });
  ::sigaction(SIGTERM, &before, nullptr);

  for (const PersistentRank& rank : ranks) {
    EXPECT_EQ(rank.signal, SIGTERM);
    EXPECT_FALSE(rank.was_told);
  }
}

TEST(PersistentRanks, AreRefusedInANumberThatNobodyHas) {
  for (const int number : {0, -1, 1025})
    EXPECT_THROW((void)run_persistent_ranks(number, [] { return 0; }), UsageError);
}

}  // namespace
}  // namespace isoshard
