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
    entry.group_members = {0, 1, 2};
    return entry;
  }
  static JournalEntry pair_barrier(std::uint64_t group_id, RankSet members) {
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
  EXPECT_EQ(entries.back().group_members, (RankSet{0, 1, 2}));
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
  journal_.enter(1, pair_barrier(5, {1, 2}));

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
  journal_.enter(0, pair_barrier(1, {0, 1}));
  journal_.enter(1, pair_barrier(2, {1, 2}));
  EXPECT_EQ(journal_.describe_circular_wait(0), "");  // rank 2 may still come to group 2

  journal_.enter(2, pair_barrier(3, {0, 2}));

  for (const int rank : {0, 1, 2}) {
    EXPECT_THAT(journal_.describe_circular_wait(rank),
                AllOf(HasSubstr("rank 0 waits for rank 1 in barrier #1"),
                      HasSubstr("rank 2 waits for rank 0 in barrier #1")));
  }
}

// What waiting ranks tell each other where they share no memory.
TEST_F(JournalTest, WhereaboutsSayWhatALaneSaysOfTheLastCall) {
  std::vector<std::byte> memory(Journal::bytes(kRanks) + 64);
  void* begin = memory.data();
  std::size_t space = memory.size();
  Journal other(static_cast<std::byte*>(std::align(64, Journal::bytes(kRanks), begin, space)),
                kRanks);
  for (std::uint64_t call = 1; call <= 100; ++call)
    journal_.finish(1, journal_.enter(1, grad_reduce(call)));
  const std::uint64_t far = std::uint64_t{70'000} << 32;
  journal_.enter(1, pair_barrier(far, {1, 2}));

  other.set_whereabouts(1, journal_.whereabouts(1));
  other.set_whereabouts(2, std::vector<std::uint64_t>{3, 4});  // cut off

  EXPECT_LT(journal_.whereabouts(1).size(), 20U);
  EXPECT_EQ(other.num_calls(1), 101U);
  EXPECT_EQ(other.last_call_in_words(1), journal_.last_call_in_words(1));
  EXPECT_EQ(other.last(1)->group_members, (RankSet{1, 2}));
  EXPECT_EQ(other.last_entered(1, far), 1U);
  EXPECT_EQ(other.last_entered(1, 0), 100U);
  EXPECT_EQ(other.last_call_in_words(2), "before its first collective");
}

// Members beyond one word, and a lane that is longer for them.
TEST(JournalOfManyRanks, KnowsAllMembersAndFindsTheMissingOne) {
  constexpr int kMany = 200, kMissing = 130;
  std::vector<std::byte> memory(Journal::bytes(kMany) + 64);
  void* begin = memory.data();
  std::size_t space = memory.size();
  Journal journal(static_cast<std::byte*>(std::align(64, Journal::bytes(kMany), begin, space)),
                  kMany);
  JournalEntry entry;
  entry.call = {.op = CollectiveOp::kBarrier, .group_sequence = 1};
  entry.group_size = kMany;
  for (int rank = 0; rank < kMany; ++rank) entry.group_members.insert(rank);

  for (int rank = 0; rank < kMany; ++rank) {
    if (rank != kMissing) journal.enter(rank, entry);
  }

  EXPECT_EQ(journal.last(199)->group_size, 200U);
  EXPECT_EQ(journal.last(199)->group_members, entry.group_members);
  EXPECT_THAT(journal.describe_hang(), HasSubstr("rank 130 has not entered barrier #1"));
  EXPECT_EQ(journal.describe_circular_wait(7), "");

  // Ranks that are one bit in words of 64.
  const RankSet far = {1, 65, 129, 193};
  entry.call.group_sequence = 2;
  entry.group_size = 4;
  entry.group_members = far;
  for (const int rank : {1, 65, 193}) journal.enter(rank, entry);
  EXPECT_EQ(journal.last(65)->group_members, far);
  const std::string hang = journal.describe_hang();
  EXPECT_THAT(hang, HasSubstr("rank 129 has not entered barrier #2"));
  for (const char* const present : {"rank 1 has not", "rank 65 has not", "rank 193 has not"})
    EXPECT_THAT(hang, ::testing::Not(HasSubstr(present)));
}

// Every rank of the first half waits for all of the second, which wait for a slow one: from each to
// each there is a way, and none of them a circle.
TEST(JournalOfManyRanks, LooksForACircleOnceInEachRank) {
  constexpr int kMany = 64, kLayers = 16, kWidth = kMany / kLayers;
  std::vector<std::byte> memory(Journal::bytes(kMany) + 64);
  void* begin = memory.data();
  std::size_t space = memory.size();
  Journal journal(static_cast<std::byte*>(std::align(64, Journal::bytes(kMany), begin, space)),
                  kMany);
  for (int rank = 0; rank < kMany - kWidth; ++rank) {
    const int layer = rank / kWidth;
    JournalEntry entry;
    entry.call = {.op = CollectiveOp::kBarrier,
                  .group_id = static_cast<std::uint64_t>(rank) + 1,
                  .group_sequence = 1};
    entry.group_size = kWidth + 1;
    entry.group_members.insert(rank);
    for (int next = 0; next < kWidth; ++next)
      entry.group_members.insert((layer + 1) * kWidth + next);
    journal.enter(rank, entry);
  }

  EXPECT_EQ(journal.describe_circular_wait(0), "");  // 4^15 ways
}

TEST(Names, ArePublicAndParsed) {
  EXPECT_EQ(name_of(Purpose::kRowParallelForward), "row_parallel.forward");
  EXPECT_EQ(name_of(Purpose::kRingDkv), "ring.dkv");
  EXPECT_EQ(name_of(Purpose::kSetup), "setup");
  for (const Backend backend : {Backend::kShm, Backend::kThread, Backend::kMpi, Backend::kNccl})
    EXPECT_EQ(parse_backend(name_of(backend)), backend);
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
