// SPDX-License-Identifier: Apache-2.0
/// Worlds on the processes of a job: the same report everywhere, and a failure that the next world
/// does not feel. Three processes run these tests together.
#include "harness/world/attached/attached_launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/run/trace_store.h"
#include "harness/world/attached/report_message.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/forked/frames.h"
#include "suite/testing/mpi_test_world.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;
using namespace std::chrono_literals;

constexpr int kProcesses = 3;

/// Of this process, for all tests: the order of worlds is the same on all.
AttachedLauncher& launcher() {
  static const std::unique_ptr<AttachedJob> job = [] {
    allow_threads_of_now();
    return attach_mpi_job();
  }();
  static AttachedLauncher& instance = *new AttachedLauncher(*job);
  return instance;
}

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kWorld};

Buffer floats_of(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kFloat32};
}

int summed(Rank& rank, std::int32_t value) {
  rank.comm()
      .all_reduce({reinterpret_cast<std::byte*>(&value), 1, Dtype::kInt32}, Reduction::kSum, kInfo)
      .wait();
  return value;
}

WorldReport run(WorldOptions options, const Launcher::Body& body) {
  return launcher().launch(std::move(options), body)->wait();
}

class AttachedWorlds : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(MpiTestWorld::attached_size(), kProcesses);
    // which counts runs, so that a program that ran nothing fails
    MpiTestWorld(kProcesses).run([](Communicator& comm) { comm.barrier({}); });
  }
};

TEST_F(AttachedWorlds, GiveEveryProcessTheResultsOfAllRanks) {
  const WorldReport report = run({.size = kProcesses, .name = "sum"}, [](Rank& rank) {
    rank.set_phase("adding");
    const int sum = summed(rank, rank.rank() + 1);
    rank.post_result(bytes_of(std::to_string(rank.rank()) + ":" + std::to_string(sum)));
  });

  ASSERT_TRUE(report.ok()) << report.describe();
  ASSERT_EQ(report.ranks.size(), 3U);
  for (int rank = 0; rank < kProcesses; ++rank) {
    const RankReport& of_rank = report.ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(text_of(of_rank.result), std::to_string(rank) + ":6");
    EXPECT_EQ(of_rank.phase, "adding");
    EXPECT_THAT(of_rank.where, HasSubstr("after all_reduce #1"));
  }
}

TEST_F(AttachedWorlds, OfFewerRanksLeaveTheOthersOut) {
  bool has_run = false;
  const WorldReport report = run({.size = 2, .name = "pair"}, [&](Rank& rank) {
    has_run = true;
    EXPECT_EQ(rank.size(), 2);
    EXPECT_EQ(rank.comm().size(), 2);
    rank.post_result(bytes_of(std::to_string(summed(rank, 5))));
  });

  EXPECT_EQ(has_run, launcher().peers()->index() < 2);
  ASSERT_EQ(report.ranks.size(), 2U);
  EXPECT_EQ(text_of(report.ranks[1].result), "10");
}

TEST_F(AttachedWorlds, OfOneRankAreForkedFromTheFirstProcess) {
  static int number = 7;
  const WorldReport report = run({.size = 1, .name = "one"}, [](Rank& rank) {
    number = 8;  // of a process of its own
    rank.post_result(bytes_of("from " + std::to_string(number)));
  });

  EXPECT_EQ(number, 7);
  ASSERT_TRUE(report.ok()) << report.describe();
  ASSERT_EQ(report.ranks.size(), 1U);
  EXPECT_EQ(text_of(report.ranks[0].result), "from 8");
}

TEST_F(AttachedWorlds, NameTheRankThatThrewAndTheNextWorldRuns) {
  const WorldReport report = run({.size = kProcesses, .name = "throws"}, [](Rank& rank) {
    rank.set_phase("failing");
    if (rank.rank() == 1) throw std::runtime_error("planted");
    summed(rank, 1);
  });
  const WorldReport next = run({.size = kProcesses, .name = "next"}, [](Rank& rank) {
    rank.post_result(bytes_of(std::to_string(summed(rank, 1))));
  });

  EXPECT_FALSE(report.ok());
  EXPECT_EQ(report.culprit, 1);
  EXPECT_THAT(report.describe(),
              AllOf(HasSubstr("rank 1 threw"), HasSubstr("planted"), HasSubstr("phase failing")));
  EXPECT_EQ(report.ranks[0].end, RankEnd::kReleased);
  ASSERT_TRUE(next.ok()) << next.describe();
  EXPECT_EQ(text_of(next.ranks[2].result), "3");
}

// Rank 2 fails while the others exchange what MPI moves for a while. The next world must not find
// any of it in memory that it has.
TEST_F(AttachedWorlds, FailAmidAnExchangeAndTheNextWorldIsUnharmed) {
  constexpr std::size_t kCount = std::size_t{4} << 20;
  for (int round = 0; round < 5; ++round) {
    const WorldReport report = run({.size = kProcesses, .name = "amid"}, [&](Rank& rank) {
      const auto pair = rank.comm().split(rank.rank() < 2 ? 0 : 1, rank.rank());
      rank.comm().barrier(kInfo);
      if (rank.rank() == 2) throw std::runtime_error("planted");
      for (;;) {
        std::vector<float> own(kCount, 1), all(2 * kCount);
        pair->all_gather(floats_of(own), floats_of(all), kInfo).wait();
      }
    });
    const WorldReport next = run({.size = kProcesses, .name = "next"}, [&](Rank& rank) {
      std::vector<float> values(2 * kCount, 1);
      rank.comm().all_reduce(floats_of(values), Reduction::kSum, kInfo).wait();
      rank.comm().barrier(kInfo);
      const auto right = std::ranges::count(values, static_cast<float>(kProcesses));
      rank.post_result(bytes_of(std::to_string(right)));
    });

    EXPECT_EQ(report.culprit, 2) << report.describe();
    EXPECT_EQ(report.ranks[0].end, RankEnd::kReleased);
    ASSERT_TRUE(next.ok()) << next.describe();
    for (const RankReport& rank : next.ranks)
      EXPECT_EQ(text_of(rank.result), std::to_string(2 * kCount)) << "round " << round;
  }
}

TEST_F(AttachedWorlds, AMissingRankIsNamedAtTheDeadline) {
  const WorldReport report =
      run({.size = kProcesses, .name = "hangs", .deadline = 300ms}, [](Rank& rank) {
        if (rank.rank() != 2) summed(rank, 1);
      });

  EXPECT_THAT(report.cause, AllOf(HasSubstr("deadline passed"),
                                  HasSubstr("rank 2 has not entered all_reduce #1")));
}

TEST_F(AttachedWorlds, AnErrorOfAWorldOfOneIsThrownEverywhere) {
  const auto running = launcher().launch({.size = 1, .name = "throws"}, [](Rank&) {
    throw FileError("weights.safetensors: planted");
  });
  EXPECT_THAT([&] { require_ok(running->wait()); }, ThrowsMessage<FileError>(HasSubstr("planted")));
}

TEST_F(AttachedWorlds, OfMoreRanksThanProcessesAreRefused) {
  EXPECT_THAT([] { (void)launcher().launch({.size = 4}, [](Rank&) {}); },
              ThrowsMessage<UsageError>(HasSubstr("from 1 to 3 ranks, got 4")));
}

class AttachedTraces : public AttachedWorlds {};

// Over the border of two pieces, so that the last one is not lost.
TEST_F(AttachedTraces, WhatEachRankHasKeptIsEverywhere) {
  constexpr std::size_t kBytes = (std::size_t{4} << 20) + 100;
  const auto store = make_trace_store(launcher(), kProcesses, 2 * kBytes, Sharing::kOwn);
  const WorldReport report = run({.size = kProcesses, .name = "keep"}, [&](Rank& rank) {
    const std::vector<std::byte> kept(kBytes + static_cast<std::size_t>(rank.rank()),
                                      std::byte(rank.rank() + 65));
    (void)store->of_rank(rank.rank())->append(kept);
  });

  ASSERT_TRUE(report.ok()) << report.describe();
  for (int rank = 0; rank < kProcesses; ++rank) {
    const auto kept = store->kept_by(rank);
    ASSERT_EQ(kept->size(), kBytes + static_cast<std::size_t>(rank));
    EXPECT_EQ(kept->data()[0], std::byte(rank + 65));
    EXPECT_EQ(kept->data()[kept->size() - 1], std::byte(rank + 65));
  }
}

TEST_F(AttachedTraces, OfAForkedRankAreEverywhere) {
  const auto store = make_trace_store(launcher(), 1, 1000, Sharing::kOwn);
  const WorldReport report = run({.size = 1, .name = "keep"},
                                 [&](Rank&) { (void)store->of_rank(0)->append(bytes_of("kept")); });

  ASSERT_TRUE(report.ok()) << report.describe();
  const auto kept = store->kept_by(0);
  ASSERT_EQ(kept->size(), 4U);
  EXPECT_EQ(std::memcmp(kept->data(), "kept", 4), 0);
}

TEST(ReportMessage, BringsBackEveryFieldAndRefusesACutOne) {
  WorldReport report;
  report.name = "world";
  report.ranks = {{.rank = 1,
                   .end = RankEnd::kThrew,
                   .code = 3,
                   .message = "what",
                   .where = "in barrier #2",
                   .phase = "setup",
                   .standard_output = "out",
                   .standard_error = "err",
                   .result = bytes_of("result"),
                   .failures = {{.file = "a.cc", .line = 7, .text = "failed", .fatal = true}},
                   .peak_rss_kib = 99}};
  report.culprit = -1;
  report.cause = "cause";
  report.interrupted = true;
  report.file_error = "file";
  report.host_pause = 12ms;

  const std::vector<std::byte> message = message_of(report);
  const WorldReport back = world_report_of(message);

  EXPECT_EQ(message_of(back), message);
  EXPECT_EQ(back.culprit, -1);
  EXPECT_EQ(back.ranks.front().failures.front().line, 7);
  EXPECT_EQ(text_of(back.ranks.front().result), "result");
  for (std::size_t size = 0; size < message.size(); ++size)
    EXPECT_THROW((void)world_report_of(std::span(message).first(size)), ProtocolError) << size;
}

}  // namespace
}  // namespace isoshard
