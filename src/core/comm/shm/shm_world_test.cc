// SPDX-License-Identifier: Apache-2.0
/// Worlds of forked processes: results, lost ranks, aborts from the controller, exhausted limits.
#include "core/comm/shm/shm_world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <numeric>
#include <vector>

#include "core/base/error.h"
#include "core/comm/shm/shm_region.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};

/// Forked ranks of one world. A rank's process ends with the code that body returns, or 99 when it
/// throws.
class ForkedRanks {
 public:
  ForkedRanks(ShmWorld& world, const std::function<int(Communicator&)>& body) {
    for (int rank = 0; rank < world.size(); ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        int code = 99;
        try {
          code = body(*world.communicator(rank));
        } catch (...) {
        }
        _exit(code);
      }
      pids_.push_back(child);
    }
  }
  ~ForkedRanks() {
    for (const pid_t pid : pids_) {
      if (pid > 0) kill(pid, SIGKILL);
      if (pid > 0) waitpid(pid, nullptr, 0);
    }
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  [[nodiscard]] pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }

  /// Exit code, or minus the signal.
  int wait_for(int rank) {
    int status = 0;
    waitpid(pids_[static_cast<std::size_t>(rank)], &status, 0);
    pids_[static_cast<std::size_t>(rank)] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  std::vector<pid_t> pids_;
};

Buffer buffer_of(std::vector<std::int64_t>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kInt64};
}

TEST(ShmWorld, AllReduceIsExactForSizesBelowAtAndAboveAWindow) {
  for (const int num_ranks : {1, 2, 3, 4, 5, 16}) {
    ShmWorld world(num_ranks);
    ForkedRanks ranks(world, [&](Communicator& comm) {
      if (comm.size() != num_ranks) return 1;
      for (const std::size_t count : {0U, 1U, 1024U, 1025U, 65536U, 65537U, 300007U}) {
        std::vector<std::int64_t> values(count);
        for (std::size_t i = 0; i < count; ++i)
          values[i] = static_cast<std::int64_t>(i) * (comm.rank() + 1);
        comm.all_reduce(buffer_of(values), Reduction::kSum, kInfo).wait();
        const std::int64_t factor = num_ranks * (num_ranks + 1) / 2;
        for (std::size_t i = 0; i < count; ++i) {
          if (values[i] != static_cast<std::int64_t>(i) * factor) return 2;
        }
      }
      return 0;
    });

    for (int rank = 0; rank < num_ranks; ++rank) {
      EXPECT_EQ(ranks.wait_for(rank), 0) << "rank " << rank << " of " << num_ranks;
      EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kGradReduce),
                7U);
    }
  }
}

TEST(ShmWorld, HasNoCommunicatorOfARankThatItLacks) {
  ShmWorld world(2);

  EXPECT_THROW((void)world.communicator(-1), UsageError);
  EXPECT_THROW((void)world.communicator(2), UsageError);
}

// Every rank sums in its own process in its own group while the other groups do the same.
TEST(ShmWorld, SplitGroupsOfProcessesDoNotDisturbEachOther) {
  ShmWorld world(5);
  ForkedRanks ranks(world, [](Communicator& comm) {
    const auto group = comm.split(comm.rank() % 2, comm.rank());
    for (int call = 0; call < 200; ++call) {
      std::vector<std::int64_t> values(static_cast<std::size_t>(call) * 211, comm.rank());
      group->all_reduce(buffer_of(values), Reduction::kSum, kInfo).wait();
      for (const std::int64_t value : values) {
        if (value != (comm.rank() % 2 == 0 ? 6 : 4)) return 1;
      }
    }
    return group->size() == (comm.rank() % 2 == 0 ? 3 : 2) ? 0 : 2;
  });

  for (int rank = 0; rank < 5; ++rank) EXPECT_EQ(ranks.wait_for(rank), 0) << "rank " << rank;
}

TEST(ShmWorld, ControllerSeesWhereAKilledRankWasAndReleasesTheOthers) {
  ShmWorld world(3);
  ForkedRanks ranks(world, [](Communicator& comm) {
    comm.barrier(kInfo);
    if (comm.rank() == 1) raise(SIGKILL);
    try {
      comm.barrier(kInfo);
    } catch (const TimeoutError&) {
      return 6;  // no deadline passed
    } catch (const CommError& error) {
      return std::string(error.what())
                         .find("rank 1 was killed after barrier #1 (grad_reduce, dp)") !=
                     std::string::npos
                 ? 7
                 : 8;
    }
    return 9;
  });

  EXPECT_EQ(ranks.wait_for(1), -SIGKILL);
  world.abort("rank 1 was killed " + world.journal().last_call_in_words(1));

  EXPECT_EQ(ranks.wait_for(0), 7);
  EXPECT_EQ(ranks.wait_for(2), 7);
}

TEST(ShmWorld, DeadlineReleasesRanksThatWaitForAStoppedOne) {
  ShmWorld world(3);
  world.set_deadline(std::chrono::steady_clock::now() + 200ms);
  ForkedRanks ranks(world, [](Communicator& comm) {
    if (comm.rank() == 1) raise(SIGSTOP);
    try {
      comm.barrier(kInfo);
    } catch (const TimeoutError& error) {
      return std::string(error.what())
                         .find(
                             "rank 1 has not entered barrier #1 (grad_reduce, dp); ranks 0, 2 wait "
                             "in it") != std::string::npos
                 ? 7
                 : 8;
    }
    return 9;
  });

  EXPECT_EQ(ranks.wait_for(0), 7);
  EXPECT_EQ(ranks.wait_for(2), 7);
  kill(ranks.pid(1), SIGCONT);
  EXPECT_NE(ranks.wait_for(1), 0);
}

// 1e8 + 1 is 1e8 in fp32: only the chunk whose ring starts on the rank of -1e8 keeps the 1.
TEST(ShmWorld, ProcessesAddInTheOrderOfTheirWorld) {
  ShmWorld world(3, ReductionOrder::kRing);
  ForkedRanks ranks(world, [](Communicator& comm) {
    constexpr float kValues[] = {1e8F, 1.0F, -1e8F};
    std::vector<float> data(3, kValues[comm.rank()]);
    comm.all_reduce({reinterpret_cast<std::byte*>(data.data()), 3, Dtype::kFloat32},
                    Reduction::kSum, kInfo)
        .wait();
    return data == std::vector<float>{0, 1, 0} ? 7 : 8;
  });

  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.wait_for(rank), 7) << "rank " << rank;
}

// The block of a pair is made by whichever process comes first, in memory that the others must see;
// all pairs at once.
TEST(ShmWorld, ProcessesSendAndReceiveBetweenAllPairs) {
  constexpr int kRanks = 4;
  ShmWorld world(kRanks);
  ForkedRanks ranks(world, [](Communicator& comm) {
    const auto value = [](int from, int to, int round) { return 100 * from + 10 * to + round; };
    for (int round = 0; round < 3; ++round) {
      const std::size_t count = round == 1 ? 200'001 : 5;  // in the second round above a buffer
      std::vector<std::vector<std::int64_t>> sent;
      std::vector<std::vector<std::int64_t>> received;
      std::vector<Transfer> transfers;
      for (int peer = 0; peer < kRanks; ++peer) {
        sent.emplace_back(count, value(comm.rank(), peer, round));
        received.emplace_back(count);
        transfers.push_back({true, peer, buffer_of(sent.back()), kInfo});
        transfers.push_back({false, peer, buffer_of(received.back()), kInfo});
      }
      comm.send_recv(transfers).wait();
      for (int peer = 0; peer < kRanks; ++peer) {
        const std::vector<std::int64_t> expected(count, value(peer, comm.rank(), round));
        if (received[static_cast<std::size_t>(peer)] != expected) return 8;
      }
    }
    return 7;
  });

  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(ranks.wait_for(rank), 7) << "rank " << rank;
  EXPECT_EQ(world.journal().num_calls(2, CollectiveOp::kSend, Purpose::kGradReduce), 9U);
}

TEST(ShmWorld, MismatchedProcessesAllFail) {
  ShmWorld world(4);
  ForkedRanks ranks(world, [](Communicator& comm) {
    std::vector<std::int64_t> values(comm.rank() == 3 ? 12 : 13);
    try {
      comm.all_reduce(buffer_of(values), Reduction::kSum, kInfo).wait();
    } catch (const CommError& error) {
      return std::string(error.what()).find("int64 x 13)") != std::string::npos &&
                     std::string(error.what())
                             .find(
                                 "rank 3 called all_reduce #1 (grad_reduce, dp, sum, int64 x "
                                 "12)") != std::string::npos
                 ? 7
                 : 8;
    }
    return 9;
  });

  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks.wait_for(rank), 7) << "rank " << rank;
}

TEST(ShmWorld, ALimitOnFileSizesIsAnErrorAtCreation) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    int code = 1;
    try {
      const ShmWorld world(2);
    } catch (const InfrastructureError& error) {
      code = std::string(error.what()).find("RLIMIT_FSIZE") != std::string::npos ? 0 : 2;
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);

  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ShmRegion, ThatCannotBeMadeLeavesNoOpenFile) {
  const auto next_file = [] {
    const int fd = dup(0);
    close(fd);
    return fd;
  };
  const int before = next_file();

  EXPECT_THROW(ShmRegion(std::size_t{1} << 62), InfrastructureError);

  EXPECT_EQ(next_file(), before);
}

TEST(ShmRegion, ReservingBeyondItsEndIsAnErrorAndNoSignal) {
  ShmRegion region(1 << 20);
  const RegionMemory memory = region.memory();

  memory.reserve(0, 1 << 20);
  memory.data[(1 << 20) - 1] = std::byte{1};

  EXPECT_THROW(memory.reserve(std::size_t{1} << 40, 4096), InfrastructureError);
}

}  // namespace
}  // namespace isoshard
