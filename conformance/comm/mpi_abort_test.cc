// SPDX-License-Identifier: Apache-2.0
/// A world that fails while its ranks exchange data: every rank leaves, and what was on its way
/// reaches no memory that a rank has left. Three processes run these tests together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "conformance/comm/call_info.h"
#include "core/base/error.h"
#include "suite/testing/mpi_test_world.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr int kThree = 3;
constexpr int kRounds = 3;
constexpr std::size_t kLarge = std::size_t{4} << 20;  ///< far beyond what MPI sends at once
constexpr float kMark = 7;

Buffer floats_of(std::vector<float>& values, std::size_t begin, std::size_t count) {
  return {reinterpret_cast<std::byte*>(values.data() + begin), static_cast<std::int64_t>(count),
          Dtype::kFloat32};
}

/// What the first two ranks do together until rank 2 aborts the world. `memory` holds 2 kLarge.
using Exchange = std::function<void(Communicator& pair, std::vector<float>& memory)>;

/// Rank 2 aborts when the others have made `round` exchanges and are in the next one. Each of the
/// two uses its memory anew as soon as its call has thrown.
void abort_amid(const Exchange& exchange, int round, ReductionOrder order,
                std::vector<float>& memory, std::string& failure) {
  MpiTestWorld world(kThree, order);
  world.set_deadline(Clock::now() + std::chrono::seconds(60));
  world.run([&](Communicator& comm) {
    const auto pair = comm.split(comm.rank() < 2 ? 0 : 1, comm.rank());
    std::vector<float> word(1);
    try {
      if (comm.rank() == 2) {
        comm.recv(floats_of(word, 0, 1), 0, kInfo).wait();
        comm.abort("planted");
        comm.barrier(kInfo);  // throws
      }
      for (int i = 0;; ++i) {
        if (i == round && comm.rank() == 0) comm.send(floats_of(word, 0, 1), 2, kInfo).wait();
        exchange(*pair, memory);
      }
    } catch (const CommError& error) {
      failure = error.what();
      std::ranges::fill(memory, kMark);
    }
  });
}

/// Calls after which MPI has had every occasion to move what it still held.
void make_a_later_world() {
  MpiTestWorld world(kThree);
  world.run([](Communicator& comm) {
    std::vector<float> values(std::size_t{1} << 18, 1);
    for (int i = 0; i < 3; ++i) {
      comm.all_reduce(floats_of(values, 0, values.size()), Reduction::kSum, kInfo).wait();
      comm.barrier(kInfo);
    }
    EXPECT_EQ(std::ranges::count(values, 27.0F), std::ssize(values));
  });
}

void expect_memory_is_left_alone(const Exchange& exchange,
                                 ReductionOrder order = ReductionOrder::kOrdered) {
  if (MpiTestWorld::attached_size() != kThree) return;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<float> memory(2 * kLarge);
    std::string failure;
    abort_amid(exchange, round, order, memory, failure);
    make_a_later_world();

    EXPECT_THAT(failure, HasSubstr("planted")) << "round " << round;
    EXPECT_EQ(std::ranges::count(memory, kMark), std::ssize(memory)) << "round " << round;
  }
}

TEST(MpiAbort, ReachesNoMemoryOfAnAllGather) {
  expect_memory_is_left_alone([](Communicator& pair, std::vector<float>& memory) {
    std::vector<float> own(kLarge, 1);
    pair.all_gather(floats_of(own, 0, kLarge), floats_of(memory, 0, 2 * kLarge), kInfo).wait();
  });
}

TEST(MpiAbort, ReachesNoMemoryOfAnAllReduce) {
  expect_memory_is_left_alone([](Communicator& pair, std::vector<float>& memory) {
    pair.all_reduce(floats_of(memory, 0, 2 * kLarge), Reduction::kSum, kInfo).wait();
  });
}

TEST(MpiAbort, ReachesNoMemoryOfANativeAllReduce) {
  expect_memory_is_left_alone(
      [](Communicator& pair, std::vector<float>& memory) {
        pair.all_reduce(floats_of(memory, 0, 2 * kLarge), Reduction::kSum, kInfo).wait();
      },
      ReductionOrder::kNative);
}

TEST(MpiAbort, ReachesNoMemoryOfTransfers) {
  expect_memory_is_left_alone([](Communicator& pair, std::vector<float>& memory) {
    const int other = 1 - pair.rank();
    const std::vector<Transfer> both = {
        {.is_send = true, .peer = other, .data = floats_of(memory, 0, kLarge), .info = kInfo},
        {.is_send = false,
         .peer = other,
         .data = floats_of(memory, kLarge, kLarge),
         .info = kInfo}};
    pair.send_recv(both).wait();
  });
}

// Rank 0 gives up while half of a message has come, as its sender computes for a while and moves
// nothing.
TEST(MpiAbort, ReachesNoMemoryOfAReceiverThatGaveUp) {
  if (MpiTestWorld::attached_size() != kThree) return;
  constexpr std::chrono::milliseconds kPatience{50};
  std::vector<float> memory(2 * kLarge, 1);
  std::string failure;
  MpiTestWorld world(kThree);
  world.run([&](Communicator& comm) {
    const Buffer all = floats_of(memory, 0, 2 * kLarge);
    try {
      comm.barrier(kInfo);
      if (comm.rank() == 0) {
        world.set_deadline(Clock::now() + kPatience);
        comm.recv(all, 1, kInfo).wait();
      } else if (comm.rank() == 1) {
        const Transfer one{.is_send = true, .peer = 0, .data = all, .info = kInfo};
        Work sending = comm.send_recv(std::span(&one, 1));
        for (const auto end = Clock::now() + 4 * kPatience; Clock::now() < end;) {
        }
        sending.wait();
      }
      comm.barrier(kInfo);
    } catch (const CommError& error) {
      failure = error.what();
    }
    std::ranges::fill(memory, kMark);
  });
  make_a_later_world();

  EXPECT_THAT(failure, HasSubstr("deadline passed"));
  EXPECT_EQ(std::ranges::count(memory, kMark), std::ssize(memory));
}

// Its receiver never asks for it, and takes it all the same when the world ends.
TEST(MpiAbort, LetsGoOfAMessageThatNobodyReceives) {
  if (MpiTestWorld::attached_size() != kThree) return;
  std::vector<float> memory(kLarge, 1);
  std::string failure;
  MpiTestWorld world(kThree);
  world.run([&](Communicator& comm) {
    try {
      Work sending;
      if (comm.rank() == 0) {
        const Transfer one{
            .is_send = true, .peer = 1, .data = floats_of(memory, 0, kLarge), .info = kInfo};
        sending = comm.send_recv(std::span(&one, 1));
      }
      comm.barrier(kInfo);
      if (comm.rank() == 1) comm.abort("planted");
      sending.wait();
      comm.barrier(kInfo);
    } catch (const CommError& error) {
      failure = error.what();
    }
  });
  make_a_later_world();

  EXPECT_THAT(failure, HasSubstr("planted"));
}

}  // namespace
}  // namespace isoshard
