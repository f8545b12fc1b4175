// SPDX-License-Identifier: Apache-2.0
/// Transfers go on while ranks compute: a send does not wait for its receiver, Works may be waited
/// for in any order, and what is too large for the slots gets through all the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "core/comm/region/region.h"
#include "suite/testing/test_world.h"

namespace isoshard {
namespace {

constexpr CallInfo kPipe{Purpose::kPipeForward, Axis::kPp};

Buffer buffer_of(std::vector<std::int32_t>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kInt32};
}

std::vector<std::int32_t> message(int from, int to, int number, std::size_t count) {
  std::vector<std::int32_t> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<std::int32_t>(i) * 31 + from * 7 + to * 3 + number;
  return values;
}

class Transfers : public testing::TestWithParam<int> {
 protected:
  Transfers() : world_(GetParam()) {
    world_.set_deadline(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  }
  void SetUp() override { ISOSHARD_SKIP_UNLESS_WORLD_OF(GetParam()); }
  TestWorld world_;
};

// The receiver does not come before the sender has gone on.
TEST_P(Transfers, SendersGoOnBeforeReceiversCome) {
  world_.run([&](Communicator& comm) {
    const int right = (comm.rank() + 1) % comm.size();
    const int left = (comm.rank() + comm.size() - 1) % comm.size();
    std::vector<std::int32_t> sent = message(comm.rank(), right, 0, 1000);
    std::vector<std::int32_t> received(1000);

    Work send = comm.send_recv(std::vector<Transfer>{{true, right, buffer_of(sent), kPipe}});
    comm.barrier(kPipe);  // nobody comes to it from a send that waits for its receiver
    comm.send_recv(std::vector<Transfer>{{false, left, buffer_of(received), kPipe}}).wait();
    send.wait();

    EXPECT_EQ(received, message(left, comm.rank(), 0, 1000));
  });
}

// Each message is several windows large, and every rank waits for what it sends before anything it
// receives.
TEST_P(Transfers, LargeMessagesRoundARingArriveInEveryOrderOfWaits) {
  constexpr std::size_t kCount = 5 * kWindowBytes / sizeof(std::int32_t) / 2 + 3;
  for (const bool sends_first : {true, false}) {
    world_.run([&](Communicator& comm) {
      const int right = (comm.rank() + 1) % comm.size();
      const int left = (comm.rank() + comm.size() - 1) % comm.size();
      std::vector<std::vector<std::int32_t>> sent, received;
      std::vector<Work> sends, receives;
      for (int number = 0; number < 2; ++number) {
        sent.push_back(message(comm.rank(), right, number, kCount));
        received.emplace_back(kCount);
      }
      for (std::size_t number = 0; number < 2; ++number) {
        sends.push_back(
            comm.send_recv(std::vector<Transfer>{{true, right, buffer_of(sent[number]), kPipe}}));
        receives.push_back(comm.send_recv(
            std::vector<Transfer>{{false, left, buffer_of(received[number]), kPipe}}));
      }
      std::vector<Work>& first = sends_first ? sends : receives;
      std::vector<Work>& second = sends_first ? receives : sends;
      for (std::size_t number = 2; number-- > 0;) first[number].wait();
      for (Work& work : second) work.wait();

      for (int number = 0; number < 2; ++number) {
        EXPECT_EQ(received[static_cast<std::size_t>(number)],
                  message(left, comm.rank(), number, kCount));
      }
    });
  }
}

// Works are kept for a while, collectives come in between, and Works that nobody waits for finish
// when they die.
TEST_P(Transfers, OnTheirWayDisturbNoOtherCall) {
  world_.run([](Communicator& comm) {
    std::mt19937 engine(11);  // the same choices on every rank
    struct Pending {
      std::vector<std::int32_t> sent, received, expected;
      Work work;
    };
    std::deque<Pending> pending;
    for (int number = 0; number < 120; ++number) {
      const int shift = 1 + static_cast<int>(engine() % static_cast<unsigned>(comm.size() - 1));
      const int to = (comm.rank() + shift) % comm.size();
      const int from = (comm.rank() + comm.size() - shift) % comm.size();
      const std::size_t count = engine() % (number % 10 == 0 ? 800'000 : 2'000);
      Pending& next = pending.emplace_back();
      next.sent = message(comm.rank(), to, number, count);
      next.received.resize(count);
      next.expected = message(from, comm.rank(), number, count);
      next.work = comm.send_recv(std::vector<Transfer>{
          {true, to, buffer_of(next.sent), kPipe}, {false, from, buffer_of(next.received), kPipe}});
      if (engine() % 3 == 0) {
        std::vector<std::int32_t> sum(5000, comm.rank() + number);
        comm.all_reduce(buffer_of(sum), Reduction::kSum, kPipe).wait();
        const int expected = comm.size() * number + comm.size() * (comm.size() - 1) / 2;
        EXPECT_TRUE(std::ranges::all_of(sum, [&](int value) { return value == expected; }));
      }
      if (pending.size() < 4) continue;
      if (engine() % 2 == 0) {
        pending.front().work.wait();
      } else {
        pending.front().work = Work();
      }
      EXPECT_EQ(pending.front().received, pending.front().expected) << number;
      pending.pop_front();
    }
    for (Pending& last : pending) {
      last.work.wait();
      EXPECT_EQ(last.received, last.expected);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(NumRanks, Transfers, testing::Values(2, 3, 5));

}  // namespace
}  // namespace isoshard
