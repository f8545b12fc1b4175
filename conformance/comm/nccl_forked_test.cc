// SPDX-License-Identifier: Apache-2.0
/// Worlds of the nccl backend as launchers start them: forked on this host, or processes that find
/// each other by the variables of torchrun and mpirun. A stand-in takes the place of the GPUs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/nccl/nccl_world.h"
#include "core/comm/tcp/tcp_mesh.h"
#include "harness/testing/run_world.h"
#include "suite/testing/gpu/gpu_stand_in.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};

float sum_of_ranks(Communicator& comm) {
  std::vector<float> values(1000, static_cast<float>(comm.rank() + 1));
  comm.all_reduce({reinterpret_cast<std::byte*>(values.data()), 1000, Dtype::kFloat32},
                  Reduction::kSum, kInfo)
      .wait();
  return values.back();
}

/// Whatever starts ranks from here on has GPUs that tests stand in for.
class WithStandIn : public testing::Test {
 protected:
  void SetUp() override {
    set_gpu_api(
        [this](int rank, int /*size*/) { return std::make_shared<GpuStandIn>(fabric_, rank); });
  }
  void TearDown() override { set_gpu_api({}); }
  static WorldOptions options(int size, std::chrono::milliseconds deadline = 60s) {
    return {.size = size, .deadline = deadline, .transport = nccl_transport()};
  }
  GpuFabric fabric_{GpuFabric::kMaxRanks};
};

using ForkedNccl = WithStandIn;

TEST_F(ForkedNccl, RanksReduceGatherAndSend) {
  const auto sums = run_world(options(3), [](Rank& rank) {
    EXPECT_EQ(rank.comm().size(), 3);
    return sum_of_ranks(rank.comm());
  });
  EXPECT_EQ(sums, (std::vector<float>{6, 6, 6}));
}

TEST_F(ForkedNccl, ARankThatIsKilledIsNamedAndTheOthersAreReleased) {
  const WorldReport report = run_world_report(options(3), [](Rank& rank) {
    (void)sum_of_ranks(rank.comm());
    if (rank.rank() == 1) ::raise(SIGKILL);
    (void)sum_of_ranks(rank.comm());
  });
  EXPECT_FALSE(report.ok());
  EXPECT_EQ(report.culprit, 1);
  EXPECT_EQ(report.ranks[1].end, RankEnd::kSignaled);
  EXPECT_EQ(report.ranks[0].end, RankEnd::kReleased);
  EXPECT_EQ(report.ranks[2].end, RankEnd::kReleased);
}

TEST_F(ForkedNccl, ARankThatThrowsIsTheCulprit) {
  const WorldReport report = run_world_report(options(2), [](Rank& rank) {
    if (rank.rank() == 1) throw UsageError("planted");
    (void)sum_of_ranks(rank.comm());
  });
  EXPECT_EQ(report.culprit, 1);
  EXPECT_THAT(report.describe(), HasSubstr("planted"));
}

TEST_F(ForkedNccl, AMismatchedCallIsNamedOnBothRanks) {
  const WorldReport report = run_world_report(options(2), [](Rank& rank) {
    if (rank.rank() == 1) rank.comm().barrier(kInfo);
    (void)sum_of_ranks(rank.comm());
  });
  EXPECT_THAT(report.describe(), AllOf(HasSubstr("collectives differ: rank 0 called all_reduce #1"),
                                       HasSubstr("rank 1 called barrier #1")));
}

// The journal is shared memory: the process that forked the ranks reads where each of them is.
TEST_F(ForkedNccl, AMissingRankIsNamedAtTheDeadline) {
  const WorldReport report = run_world_report(options(2, 500ms), [](Rank& rank) {
    (void)sum_of_ranks(rank.comm());
    while (rank.rank() == 1) ::pause();
    (void)sum_of_ranks(rank.comm());
  });
  EXPECT_FALSE(report.ok());
  EXPECT_THAT(
      report.describe(),
      HasSubstr("rank 1 has not entered all_reduce #2 (grad_reduce, dp, sum, fp32 x 1000)"));
}

TEST_F(ForkedNccl, WithoutCudaAWorldIsRefusedByName) {
  set_gpu_api({});
  const WorldReport report = run_world_report(options(2), [](Rank&) {});
  EXPECT_THAT(report.describe(), HasSubstr("backend nccl is not part of this program"));
}

/// Ranks that are forked, but know each other by variables only.
class AttachedNccl : public WithStandIn {
 protected:
  static void set_variables(int rank, int size, int port, const char* of_mpirun = nullptr) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
                             "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                             "SLURM_PROCID", "SLURM_NTASKS", "TORCHELASTIC_USE_AGENT_STORE"})
      ::unsetenv(name);
    const auto set = [](const std::string& name, int value) {
      ::setenv(name.c_str(), std::to_string(value).c_str(), 1);
    };
    if (of_mpirun == nullptr) {
      set("RANK", rank);
      set("WORLD_SIZE", size);
      set("LOCAL_RANK", rank);
      ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    } else {
      set("OMPI_COMM_WORLD_RANK", rank);
      set("OMPI_COMM_WORLD_SIZE", size);
      set("OMPI_COMM_WORLD_LOCAL_RANK", rank);
      set("OMPI_COMM_WORLD_LOCAL_SIZE", size);
    }
    set("MASTER_PORT", port);
  }
  /// A port that nobody listens at: the next moment's owner is rank 0 of this test.
  static int free_port() { return LoopbackListener().port(); }
};

TEST_F(AttachedNccl, RanksFindEachOtherByTheVariablesOfTorchrunAndMpirun) {
  for (const char* launcher : {static_cast<const char*>(nullptr), "mpirun"}) {
    const int port = free_port();
    const auto sums = run_world(3, [&](Rank& rank) {
      set_variables(rank.rank(), 3, port, launcher);
      const auto comm = attach_nccl_world({.expected_size = 3});
      EXPECT_EQ(comm->rank(), rank.rank());
      return sum_of_ranks(*comm);
    });
    EXPECT_EQ(sums, (std::vector<float>{6, 6, 6}));
  }
}

TEST_F(AttachedNccl, AJobMakesWorldsOneAfterTheOtherAlsoAfterAnAbort) {
  const int port = free_port();
  const auto sums = run_world(2, [&](Rank& rank) {
    set_variables(rank.rank(), 2, port);
    const auto job = attach_nccl_job();
    EXPECT_EQ(job->size(), 2);
    {
      const auto broken = job->make_world(ReductionOrder::kOrdered);
      const auto comm = broken->communicator(job->rank());
      if (rank.rank() == 0) comm->abort("planted");
      EXPECT_THROW((void)sum_of_ranks(*comm), CommError);
    }
    EXPECT_EQ(job->largest(static_cast<std::uint64_t>(job->rank())), 1U);
    const auto world = job->make_world(ReductionOrder::kRing);
    const float sum = sum_of_ranks(*world->communicator(job->rank()));
    job->finish();
    return sum;
  });
  EXPECT_EQ(sums, (std::vector<float>{3, 3}));
}

TEST_F(AttachedNccl, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  const int port = free_port();
  run_world(3, [&](Rank& rank) {
    if (rank.rank() == 2) return;
    set_variables(rank.rank(), 3, port);
    std::string words;
    try {
      (void)attach_nccl_world({.deadline = std::chrono::steady_clock::now() + 500ms});
    } catch (const TimeoutError& error) {
      words = error.what();
    }
    EXPECT_THAT(words, rank.rank() == 0 ? HasSubstr("rank 2 of 3 has not come to the rendezvous")
                                        : HasSubstr("rank 1 got no answer of rank 0"));
  });
}

// Nobody waits for the deadline of a rank that will not come.
TEST_F(AttachedNccl, ARankThatHasLeftIsNamedBeforeTheDeadline) {
  const int port = free_port();
  run_world(2, [&](Rank& rank) {
    set_variables(rank.rank(), 2, port);
    const auto comm = attach_nccl_world({.deadline = std::chrono::steady_clock::now() + 20s});
    EXPECT_EQ(sum_of_ranks(*comm), 3);
    if (rank.rank() == 1) return;
    std::string words;
    try {
      (void)sum_of_ranks(*comm);
    } catch (const CommError& error) {
      words = error.what();
    }
    EXPECT_THAT(words, AllOf(HasSubstr("rank 1 has left the world"),
                             HasSubstr("rank 1 has not entered all_reduce #2")));
  });
}

TEST_F(AttachedNccl, AnotherSizeIsRefusedOnBothSides) {
  const int port = free_port();
  run_world(2, [&](Rank& rank) {
    set_variables(rank.rank(), rank.rank() == 0 ? 2 : 4, port);
    EXPECT_THROW((void)attach_nccl_world(), UsageError);
  });
  run_world(1, [&](Rank&) {
    set_variables(0, 1, port);
    EXPECT_THROW((void)attach_nccl_world({.expected_size = 2}), UsageError);
  });
}

TEST_F(AttachedNccl, AWorldOfOneNeedsNobody) {
  const auto sums = run_world(1, [&](Rank&) {
    set_variables(0, 1, free_port());
    return sum_of_ranks(*attach_nccl_world());
  });
  EXPECT_EQ(sums, std::vector<float>{1});
}

}  // namespace
}  // namespace isoshard
