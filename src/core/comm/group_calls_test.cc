// SPDX-License-Identifier: Apache-2.0
/// A call of a group whose ranks leave the world after it.
#include "core/comm/control/group_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Packet barrier_packet() {
  Packet packet;
  packet.entry.call.op = CollectiveOp::kBarrier;
  packet.entry.call.group_sequence = 1;
  packet.entry.group_size = 3;
  packet.entry.group_members = {0, 1, 2};
  return packet;
}

/// Rank 2 of a world of three. Each poll takes one step of a script.
class ScriptedEndpoint final : public ControlEndpoint {
 public:
  struct Step {
    std::vector<int> packets_of{};  ///< ranks whose announcement of the barrier comes
    std::vector<int> leaving{};     ///< ranks that are gone when those have come
  };

  explicit ScriptedEndpoint(std::deque<Step> script)
      : ControlEndpoint(/*rank=*/2, /*size=*/3, ReductionOrder::kOrdered),
        script_(std::move(script)) {}
  void post(int /*world_rank*/, const Bytes& /*packet*/) override {}

 protected:
  void take_all_packets() override {
    if (script_.empty()) return;
    const Step step = script_.front();
    script_.pop_front();
    for (const int from : step.packets_of) handle(barrier_packet(), from);
    for (const int rank : step.leaving) gone_.insert(rank);
  }
  void flush() override {}
  void pause(bool /*moves_data*/) noexcept override {}
  std::string why_gone(const RankSet& ranks, bool /*moves_data*/) override {
    for (int other = 0; other < size(); ++other)
      if (ranks.contains(other) && gone_.contains(other))
        return "rank " + std::to_string(other) + " has left the world";
    return {};
  }

 private:
  std::deque<Step> script_;
  RankSet gone_;
};

void meet_in_barrier(std::deque<ScriptedEndpoint::Step> script) {
  ScriptedEndpoint endpoint(std::move(script));
  GroupCalls calls(endpoint);
  Packet own = barrier_packet();
  EXPECT_EQ(calls.meet(std::move(own), {}).packets.size(), 3U);
}

// Polls 1 and 2 are those before the wait.
TEST(GroupCalls, GoOnWhereARankLeftAfterItsPacketCame) {
  meet_in_barrier({{}, {}, {.packets_of = {1}, .leaving = {1}}, {}, {}, {.packets_of = {0}}});
}

TEST(GroupCalls, GoOnWhereThePacketOfARankThatLeftIsTakenLater) {
  meet_in_barrier({{}, {.leaving = {1}}, {.packets_of = {1}}, {}, {.packets_of = {0}}});
}

TEST(GroupCalls, EndWhereARankLeftWithoutItsPacket) {
  EXPECT_THAT(
      [] { meet_in_barrier({{}, {}, {.packets_of = {1}, .leaving = {0, 1}}, {}, {}}); },
      ThrowsMessage<CommError>(HasSubstr("rank 0 has left the world")));
}

}  // namespace
}  // namespace isoshard
