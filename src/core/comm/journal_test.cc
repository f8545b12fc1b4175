// SPDX-License-Identifier: Apache-2.0
/// What the journal keeps, and what it says about a hang.
#include "core/comm/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "core/base/error.h"
#include "core/comm/backend.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

class JournalTest : public testing::Test {
 protected:
  static constexpr int kRanks = 3;
  JournalTest()
      : memory_(static_cast<std::byte*>(std::aligned_alloc(64, Journal::bytes(kRanks))),
                &std::free),
        journal_(memory_.get(), kRanks) {
    std::fill_n(memory_.get(), Journal::bytes(kRanks), std::byte{0});
  }

  static JournalEntry grad_reduce(std::uint64_t group_sequence) {
    JournalEntry entry;
    entry.call = {.op = CollectiveOp::kAllReduce,
                  .purpose = Purpose::kGradReduce,
                  .axis = Axis::kDp,
                  .dtype = Dtype::kFloat32,
                  .count = 1024,
                  .group_sequence = group_sequence};
    entry.group_size = kRanks;
    entry.group_members = 0b111;
    return entry;
  }
  static JournalEntry pair_barrier(std::uint32_t group_id, std::uint32_t members) {
    JournalEntry entry;
    entry.call = {.op = CollectiveOp::kBarrier,
                  .purpose = Purpose::kSetup,
                  .axis = Axis::kTp,
                  .group_id = group_id,
                  .group_sequence = 1};
    entry.group_size = 2;
    entry.group_members = members;
    return entry;
  }

  std::unique_ptr<std::byte, void (*)(void*)> memory_;
  Journal journal_;
};

TEST_F(JournalTest, KeepsTheLast64CallsAndCountsAll) {
  for (std::uint64_t call = 1; call <= 100; ++call)
    journal_.finish(1, journal_.enter(1, grad_reduce(call)));

  const auto entries = journal_.entries(1);

  ASSERT_EQ(entries.size(), Journal::kDepth);
  EXPECT_EQ(entries.front().sequence, 37U);
  EXPECT_EQ(entries.back().sequence, 100U);
  EXPECT_TRUE(matches(entries.back().call, grad_reduce(100).call));
  EXPECT_EQ(entries.back().group_members, 0b111U);
  EXPECT_EQ(entries.back().state, CallState::kDone);
  EXPECT_EQ(journal_.num_calls(1), 100U);
  EXPECT_EQ(journal_.num_calls(1, CollectiveOp::kAllReduce, Purpose::kGradReduce), 100U);
  EXPECT_EQ(journal_.num_calls(1, CollectiveOp::kBarrier, Purpose::kGradReduce), 0U);
  EXPECT_THAT(journal_.entries(0), IsEmpty());
}

TEST_F(JournalTest, SaysWhatARankDidLast) {
  EXPECT_EQ(journal_.last_call_in_words(2), "before its first collective");

  const std::uint64_t sequence = journal_.enter(2, grad_reduce(7));
  EXPECT_EQ(journal_.last_call_in_words(2), "in all_reduce #7 (grad_reduce, dp, sum, fp32 x 1024)");
  journal_.finish(2, sequence);
  EXPECT_EQ(journal_.last_call_in_words(2),
            "after all_reduce #7 (grad_reduce, dp, sum, fp32 x 1024)");
}

TEST_F(JournalTest, HangNamesWhoIsMissingAndWhoWaits) {
  for (const int rank : {0, 2}) journal_.enter(rank, grad_reduce(7));

  EXPECT_THAT(journal_.describe_hang(),
              HasSubstr("rank 1 has not entered all_reduce #7 (grad_reduce, dp, sum, fp32 x 1024); "
                        "ranks 0, 2 wait in it; rank 1 is before its first collective"));
}

TEST_F(JournalTest, HangNamesARankThatEnteredSomethingElse) {
  journal_.enter(0, grad_reduce(7));
  journal_.enter(2, grad_reduce(7));
  journal_.enter(1, pair_barrier(5, 0b110));

  const std::string hang = journal_.describe_hang();

  EXPECT_THAT(hang, HasSubstr("rank 1 has not entered all_reduce #7"));
  EXPECT_THAT(hang, HasSubstr("rank 1 is in barrier #1 (setup, tp)"));
  EXPECT_THAT(hang, HasSubstr("rank 2 has not entered barrier #1 (setup, tp); rank 1 waits in it"));
}

TEST_F(JournalTest, HangWithAllRanksInsideSaysSoAndNoHangIsEmpty) {
  EXPECT_EQ(journal_.describe_hang(), "");
  for (const int rank : {0, 1, 2}) journal_.enter(rank, grad_reduce(1));

  EXPECT_THAT(journal_.describe_hang(), HasSubstr("every rank has entered all_reduce #1"));
}

TEST_F(JournalTest, CircularWaitIsFoundOnlyWhenItClosesOnTheCaller) {
  journal_.enter(0, pair_barrier(1, 0b011));
  journal_.enter(1, pair_barrier(2, 0b110));
  EXPECT_EQ(journal_.describe_circular_wait(0), "");  // rank 2 may still come to group 2

  journal_.enter(2, pair_barrier(3, 0b101));

  for (const int rank : {0, 1, 2}) {
    EXPECT_THAT(journal_.describe_circular_wait(rank),
                AllOf(HasSubstr("rank 0 waits for rank 1 in barrier #1"),
                      HasSubstr("rank 2 waits for rank 0 in barrier #1")));
  }
}

TEST(Names, ArePublicAndParsed) {
  EXPECT_EQ(name_of(Purpose::kRowParallelForward), "row_parallel.forward");
  EXPECT_EQ(name_of(Purpose::kRingDkv), "ring.dkv");
  EXPECT_EQ(name_of(Purpose::kSetup), "setup");
  EXPECT_EQ(parse_backend("thread"), Backend::kThread);
  EXPECT_THROW((void)parse_backend("tcp"), UsageError);
}

TEST(Work, WaitsOnceThrowsAgainAndIsWaitedForWhenDropped) {
  int runs = 0;
  {
    Work work([&] { ++runs; });
    work.wait();
    work.wait();
    Work dropped([&] { ++runs; });
    Work replaced([&] { ++runs; });
    replaced = Work();
    EXPECT_EQ(runs, 2);
  }
  Work failing([] { throw CommError("lost"); });

  EXPECT_EQ(runs, 3);
  EXPECT_THROW(failing.wait(), CommError);
  EXPECT_THROW(failing.wait(), CommError);
}

}  // namespace
}  // namespace isoshard
