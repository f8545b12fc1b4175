// SPDX-License-Identifier: Apache-2.0
// Every transfer is there on both sides, in an order in which ranks that block never deadlock.
#include "subjects/parallel/nd/schedule/schedule_transfers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/every_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_check.h"
#include "subjects/parallel/nd/schedule/schedule_text.h"

namespace isoshard {
namespace {

using enum PipelineKind;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Turns = std::vector<std::vector<PipelineTurn>>;

StageTransfer mirrored(const StageTransfer& transfer, int rank) {
  return {!transfer.is_send,   transfer.is_gradient, transfer.peer_stage, transfer.stage, rank,
          transfer.micro_batch};
}

/// All transfers of a rank, in order.
std::vector<StageTransfer> flat(const std::vector<PipelineTurn>& turns) {
  std::vector<StageTransfer> all;
  for (const PipelineTurn& turn : turns)
    all.insert(all.end(), turn.transfers.begin(), turn.transfers.end());
  return all;
}

/// Whether ranks that make one blocking transfer after the other all come to their end.
bool ends_one_by_one(const Turns& turns) {
  std::vector<std::vector<StageTransfer>> all;
  for (const auto& own : turns) all.push_back(flat(own));
  std::vector<std::size_t> next(all.size());
  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (next[rank] == all[rank].size()) continue;
      const StageTransfer& own = all[rank][next[rank]];
      const auto peer = static_cast<std::size_t>(own.peer_rank);
      if (next[peer] == all[peer].size() ||
          all[peer][next[peer]] != mirrored(own, static_cast<int>(rank)))
        continue;
      ++next[rank];
      ++next[peer];
      progress = true;
    }
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (next[rank] != all[rank].size()) return false;
  return true;
}

/// Whether ranks that block in each group until every peer of it is in its group with the other
/// side all come to their end.
bool ends_group_by_group(const Turns& turns) {
  std::vector<std::size_t> next(turns.size());
  const auto skip = [&](std::size_t rank) {
    while (next[rank] < turns[rank].size() && turns[rank][next[rank]].transfers.empty())
      ++next[rank];
  };
  for (bool progress = true; progress;) {
    progress = false;
    std::set<std::size_t> stuck;
    for (std::size_t rank = 0; rank < turns.size(); ++rank) {
      skip(rank);
      if (next[rank] == turns[rank].size()) stuck.insert(rank);
    }
    // Ranks that wait for one that is not in the matching group cannot go on; the others can.
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t rank = 0; rank < turns.size(); ++rank) {
        if (stuck.contains(rank)) continue;
        for (const StageTransfer& own : turns[rank][next[rank]].transfers) {
          const auto peer = static_cast<std::size_t>(own.peer_rank);
          const auto other = mirrored(own, static_cast<int>(rank));
          if (!stuck.contains(peer) &&
              std::ranges::count(turns[peer][next[peer]].transfers, other) == 1)
            continue;
          changed = stuck.insert(rank).second || changed;
        }
      }
    }
    for (std::size_t rank = 0; rank < turns.size(); ++rank) {
      if (stuck.contains(rank)) continue;
      ++next[rank];
      progress = true;
    }
  }
  for (std::size_t rank = 0; rank < turns.size(); ++rank) {
    skip(rank);
    if (next[rank] != turns[rank].size()) return false;
  }
  return true;
}

TEST(PipelineTransfers, OfAnActionAreThoseOfItsNeighbors) {
  const PipelineSpec spec{kInterleaved1F1B, 2, 2, StagePlacement::kLoop, 2};
  const auto first = transfers_of(spec, {ActionKind::kForward, 0, 1}),
             middle = transfers_of(spec, {ActionKind::kBackwardInput, 2, 1}),
             last = transfers_of(spec, {ActionKind::kForward, 3, 1}),
             weight = transfers_of(spec, {ActionKind::kBackwardWeight, 2, 1});

  EXPECT_EQ(first.receives, std::nullopt);
  EXPECT_EQ(first.sends, (StageTransfer{true, false, 0, 1, 1, 1}));
  EXPECT_EQ(middle.receives, (StageTransfer{false, true, 2, 3, 1, 1}));
  EXPECT_EQ(middle.sends, (StageTransfer{true, true, 2, 1, 1, 1}));
  EXPECT_EQ(last.receives, (StageTransfer{false, false, 3, 2, 0, 1}));
  EXPECT_EQ(last.sends, std::nullopt);
  EXPECT_EQ(weight.receives, std::nullopt);
  EXPECT_EQ(weight.sends, std::nullopt);
  EXPECT_EQ(to_string(*middle.receives), "2RECV_B1");
  EXPECT_EQ(to_string(*first.sends), "0SEND_F1");
}

TEST(PipelineTransfers, NeighborsOnOneRankHaveNone) {
  const PipelineSpec v{kInterleaved1F1B, 2, 2, StagePlacement::kV, 1};
  EXPECT_EQ(transfers_of(v, {ActionKind::kForward, 1, 0}).sends, std::nullopt);
  EXPECT_EQ(transfers_of(v, {ActionKind::kBackward, 1, 0}).receives, std::nullopt);
  for (const auto& own :
       pipeline_turns(make_schedule({kInterleaved1F1B, 1, 3, StagePlacement::kLoop, 2})))
    EXPECT_THAT(flat(own), IsEmpty());
}

TEST(PipelineTransfers, OfASmallScheduleByHand) {
  const Turns turns = pipeline_turns(make_schedule({k1F1B, 2, 1, StagePlacement::kLoop, 2}));
  const auto text = [](const std::vector<PipelineTurn>& own) {
    std::vector<std::string> lines;
    for (const PipelineTurn& turn : own) {
      std::string line = std::to_string(turn.time_step) + ":";
      if (turn.action) line += " " + to_string(*turn.action);
      for (const StageTransfer& transfer : turn.transfers) line += " " + to_string(transfer);
      lines.push_back(line);
    }
    return lines;
  };

  EXPECT_THAT(text(turns[0]), ElementsAre("0: 0F0 0SEND_F0", "1: 0F1 0SEND_F1", "2: 0RECV_B0",
                                          "3: 0B0", "4: 0RECV_B1", "5: 0B1"));
  EXPECT_THAT(text(turns[1]), ElementsAre("0: 1RECV_F0", "1: 1F0 1RECV_F1", "2: 1B0 1SEND_B0",
                                          "3: 1F1", "4: 1B1 1SEND_B1"));
}

TEST(PipelineTransfers, AreExactlyThoseOfTheActionsAndInTime) {
  for (const PipelineSpec& spec : every_spec()) {
    const Turns turns = pipeline_turns(make_schedule(spec));
    for (std::size_t rank = 0; rank < turns.size(); ++rank) {
      std::vector<StageTransfer> received, wanted_receives, sent, wanted_sends;
      for (const PipelineTurn& turn : turns[rank]) {
        if (turn.action) {
          const ActionTransfers own = transfers_of(spec, *turn.action);
          if (own.sends) wanted_sends.push_back(*own.sends);
          if (own.receives) {
            ASSERT_EQ(std::ranges::count(received, *own.receives), 1) << slug(spec);
            wanted_receives.push_back(*own.receives);
          }
        }
        for (const StageTransfer& transfer : turn.transfers)
          (transfer.is_send ? sent : received).push_back(transfer);
      }
      ASSERT_EQ(sent, wanted_sends) << slug(spec);
      ASSERT_EQ(received.size(), wanted_receives.size()) << slug(spec);
    }
  }
}

TEST(PipelineTransfers, NeverDeadlockInGroupsOrOneByOne) {
  for (const PipelineSpec& spec : every_spec()) {
    const Turns turns = pipeline_turns(make_schedule(spec));
    ASSERT_TRUE(ends_one_by_one(turns)) << slug(spec);
    ASSERT_TRUE(ends_group_by_group(turns)) << slug(spec);
  }
}

/// A table whose ranks take any action that is ready, by a fixed seed.
PipelineSchedule random_schedule(PipelineSpec spec, std::uint32_t seed) {
  spec.kind = kCustom;
  std::mt19937 random(seed);
  PipelineSchedule schedule{spec, PipelineTable(static_cast<std::size_t>(spec.pp))};
  const auto stages = static_cast<std::size_t>(num_stages(spec));
  std::vector<int> forwards(stages), backwards(stages);
  for (int left = 2 * num_stages(spec) * spec.micro_batches; left > 0;) {
    const std::size_t stage = random() % stages;
    const bool is_backward = random() % 2 == 1;
    int& next = is_backward ? backwards[stage] : forwards[stage];
    const bool is_ready =
        is_backward ? next < forwards[stage] && (stage + 1 == stages || next < backwards[stage + 1])
                    : next < spec.micro_batches && (stage == 0 || next < forwards[stage - 1]);
    if (!is_ready) continue;
    const int index = static_cast<int>(stage);
    schedule.table[static_cast<std::size_t>(rank_of_stage(spec, index))].emplace_back(
        PipelineAction{is_backward ? ActionKind::kBackward : ActionKind::kForward, index, next++});
    --left;
  }
  return schedule;
}

TEST(PipelineTransfers, OfTablesThatSomebodyElseMadeNeverDeadlock) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const PipelineSpec spec{kCustom, 2 + static_cast<int>(seed % 3), 1 + static_cast<int>(seed % 2),
                            seed % 4 < 2 ? StagePlacement::kLoop : StagePlacement::kV, 5};
    const PipelineSchedule schedule = random_schedule(spec, seed);
    const Turns turns = pipeline_turns(schedule);

    ASSERT_TRUE(check(schedule).empty()) << "seed " << seed;
    ASSERT_TRUE(ends_one_by_one(turns)) << "seed " << seed;
    ASSERT_TRUE(ends_group_by_group(turns)) << "seed " << seed;
  }
}

TEST(PipelineTransfers, ADeadlockWouldBeSeen) {
  // Rank 1 wants to send its first gradient before it receives its first activation.
  const Turns turns = pipeline_turns(make_schedule({k1F1B, 2, 1, StagePlacement::kLoop, 4}));
  Turns late = turns;
  auto& own = late[1];
  const auto with_receive = std::ranges::find_if(own, [](const PipelineTurn& turn) {
    return !turn.transfers.empty() && !turn.transfers.front().is_send;
  });
  const auto with_send = std::ranges::find_if(own, [](const PipelineTurn& turn) {
    return !turn.transfers.empty() && turn.transfers.front().is_send;
  });
  std::swap(with_receive->transfers, with_send->transfers);

  EXPECT_TRUE(ends_one_by_one(turns) && ends_group_by_group(turns));
  EXPECT_FALSE(ends_one_by_one(late));
  EXPECT_FALSE(ends_group_by_group(late));
}

TEST(PipelineTransfers, AGroupHasAtMostOneFromOneRankToAnother) {
  for (const PipelineSpec& spec : every_spec())
    for (const auto& own : pipeline_turns(make_schedule(spec)))
      for (const PipelineTurn& turn : own) {
        std::set<std::pair<bool, int>> seen;
        for (const StageTransfer& transfer : turn.transfers)
          ASSERT_TRUE(seen.insert({transfer.is_send, transfer.peer_rank}).second) << slug(spec);
      }
}

TEST(PipelineTransfers, OfATableThatNeverRunsAreRefused) {
  const PipelineSpec spec{k1F1B, 2, 1, StagePlacement::kLoop, 1};
  EXPECT_THROW((void)pipeline_turns(schedule_from_csv(spec, "0B0,0F0\n1F0,1B0\n", "")), UsageError);
}

}  // namespace
}  // namespace isoshard
