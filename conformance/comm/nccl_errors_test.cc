// SPDX-License-Identifier: Apache-2.0
/// What goes wrong in CUDA or NCCL on one rank is named on all, and ends what waits for it; and
/// calls keep the order of the callers' streams.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "conformance/comm/call_info.h"
#include "core/base/error.h"
#include "suite/testing/gpu/gpu_stand_in.h"
#include "suite/testing/gpu/nccl_test_world.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

GpuStandIn& gpu() {
  return dynamic_cast<GpuStandIn&>(NcclTestWorld::api());
}

Buffer buffer_of_floats(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kFloat32};
}

struct Failure {
  std::string words;  ///< of the CommError; empty if there was none
  bool is_timeout = false;
};

/// All tests on all ranks of the program; the last one is where it goes wrong.
class NcclErrors : public testing::Test {
 protected:
  void SetUp() override {
    if (size() == 1) GTEST_SKIP() << "no communicator of NCCL is made for one rank";
    world_.emplace(size());
    world_->set_deadline(Clock::now() + 60s);
  }
  void TearDown() override {
    for (std::atomic<bool>* fault :
         {&gpu().faults().start_fails, &gpu().faults().start_hangs, &gpu().faults().comms_fail,
          &gpu().faults().kernels_hang, &gpu().faults().copies_throw})
      *fault = false;
  }
  static int size() { return NcclTestWorld::attached_size(); }
  static bool is_last() { return NcclTestWorld::attached_rank() == size() - 1; }
  static void reduce(Communicator& comm, std::size_t count = 1000) {
    std::vector<float> values(count, 1);
    comm.all_reduce(buffer_of_floats(values), Reduction::kSum, kInfo).wait();
    EXPECT_EQ(values.back(), static_cast<float>(comm.size()));
  }
  Failure failure_of(const std::function<void(Communicator&)>& body) {
    Failure failure;
    world_->run([&](Communicator& comm) {
      try {
        body(comm);
      } catch (const TimeoutError& error) {
        failure = {error.what(), true};
      } catch (const CommError& error) {
        failure = {error.what(), false};
      }
    });
    return failure;
  }
  std::string blame(const std::string& words) const {
    return fmt::format("rank {}: {}", size() - 1, words);
  }
  std::optional<NcclTestWorld> world_;
};

TEST_F(NcclErrors, AnAsynchronousErrorIsNamedOnEveryRankAndEndsItsKernels) {
  const int aborted_before = gpu().num_aborted_comms();
  const Failure failure = failure_of([&](Communicator& comm) {
    reduce(comm);
    if (is_last()) gpu().faults().comms_fail = true;
    reduce(comm);
  });

  EXPECT_EQ(failure.words, blame("NCCL reports in all_reduce #2 (grad_reduce, dp, sum, fp32 x "
                                 "1000): remote process exited or there was a network error"));
  EXPECT_EQ(gpu().num_aborted_comms(), aborted_before + 1);
}

TEST_F(NcclErrors, ACommunicatorThatCannotBeMadeIsNamedOnEveryRank) {
  const Failure failure = failure_of([&](Communicator& comm) {
    if (is_last()) gpu().faults().start_fails = true;
    reduce(comm);
  });

  EXPECT_EQ(failure.words, blame("NCCL reports in all_reduce #1 (grad_reduce, dp, sum, fp32 x "
                                 "1000): unhandled system error: the network has no interface"));
}

TEST_F(NcclErrors, ACommunicatorThatIsNeverReadyEndsAtTheDeadline) {
  world_->set_deadline(Clock::now() + 300ms);
  const Failure failure = failure_of([&](Communicator& comm) {
    if (is_last()) gpu().faults().start_hangs = true;
    reduce(comm);
  });

  EXPECT_TRUE(failure.is_timeout);
  EXPECT_THAT(failure.words, AllOf(StartsWith("deadline passed: "), HasSubstr("have not left it"),
                                   HasSubstr("all_reduce #1")));
}

TEST_F(NcclErrors, AKernelThatHangsEndsAtTheDeadlineAndIsAborted) {
  const int aborted_before = gpu().num_aborted_comms();
  world_->set_deadline(Clock::now() + 300ms);
  const Failure failure = failure_of([&](Communicator& comm) {
    if (is_last()) gpu().faults().kernels_hang = true;
    reduce(comm, 100'000);
  });

  EXPECT_TRUE(failure.is_timeout);
  EXPECT_THAT(failure.words, AllOf(StartsWith("deadline passed: "), HasSubstr("all_reduce #1")));
  EXPECT_EQ(gpu().num_aborted_comms(), aborted_before + 1);
}

// The call has returned everywhere; what it put into the streams waits for one rank.
TEST_F(NcclErrors, AnAbortReleasesRanksThatWaitForData) {
  const Failure failure = failure_of([&](Communicator& comm) {
    if (is_last()) gpu().faults().kernels_hang = true;
    std::vector<float> values(1000, 1);
    Work work = comm.all_reduce(buffer_of_floats(values), Reduction::kSum, kInfo);
    if (is_last()) comm.abort("the last rank gives up");
    work.wait();
  });

  EXPECT_EQ(failure.words, "the last rank gives up");
  EXPECT_GT(gpu().num_aborted_comms(), 0);
}

TEST_F(NcclErrors, AnErrorOfCudaIsNamedOnEveryRank) {
  if (NcclTestWorld::is_on_device()) GTEST_SKIP() << "the caller's own copies would fail first";
  const Failure failure = failure_of([&](Communicator& comm) {
    reduce(comm);
    if (is_last()) gpu().faults().copies_throw = true;
    std::vector<float> values(100'000, 1);
    comm.all_reduce(buffer_of_floats(values), Reduction::kSum, kInfo).wait();
  });

  EXPECT_EQ(failure.words, blame("cudaMemcpyAsync: an illegal memory access"));
}

TEST_F(NcclErrors, AnErrorOfATransferReachesTheOtherSide) {
  const Failure failure = failure_of([&](Communicator& comm) {
    std::vector<float> values(1000, 1);
    if (is_last()) gpu().faults().start_fails = true;
    if (is_last()) comm.send(buffer_of_floats(values), 0, kInfo).wait();
    if (comm.rank() == 0) comm.recv(buffer_of_floats(values), size() - 1, kInfo).wait();
    comm.barrier(kInfo);
  });

  EXPECT_THAT(failure.words,
              AllOf(StartsWith(blame("NCCL reports in ")), HasSubstr("unhandled system error")));
}

// Nothing of the broken world is left: the next one works.
TEST_F(NcclErrors, AWorldAfterABrokenOneWorks) {
  const Failure broken = failure_of([&](Communicator& comm) {
    if (is_last()) gpu().faults().kernels_hang = true;
    std::vector<float> values(1000, 1);
    Work work = comm.all_reduce(buffer_of_floats(values), Reduction::kSum, kInfo);
    if (is_last()) comm.abort("the last rank gives up");
    work.wait();
  });
  gpu().faults().kernels_hang = false;
  world_.emplace(size());
  world_->set_deadline(Clock::now() + 60s);

  const Failure next = failure_of([&](Communicator& comm) { reduce(comm); });

  EXPECT_NE(broken.words, "");
  EXPECT_EQ(next.words, "");
}

class NcclStreams : public NcclErrors {
 protected:
  /// On the device, written late by work on a stream.
  struct OnDevice {
    OnDevice(std::size_t count, float value)
        : stream(gpu().make_stream()),
          buffer{gpu().allocate(count * sizeof(float)),
                 static_cast<std::int64_t>(count),
                 Dtype::kFloat32,
                 {Device::Kind::kCuda, 0},
                 stream} {
      gpu().delay(stream, 20);
      gpu().enqueue(stream, [data = buffer.data, count, value] {
        std::fill_n(reinterpret_cast<float*>(data), count, value);
        return true;
      });
    }
    ~OnDevice() {
      gpu().destroy_stream(stream);
      gpu().free(buffer.data);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    [[nodiscard]] float value_at(std::int64_t i) const {
      float value = 0;
      std::memcpy(&value, buffer.data + static_cast<std::size_t>(i) * sizeof value, sizeof value);
      return value;
    }
    GpuStream stream;
    Buffer buffer;
  };
};

TEST_F(NcclStreams, ACallComesAfterWhatItsStreamHoldsAndWaitPutsTheResultInPlace) {
  world_->run([&](Communicator& comm) {
    for (const std::size_t count : {std::size_t{100}, std::size_t{200'000}}) {
      OnDevice data(count, static_cast<float>(comm.rank() + 1));

      comm.all_reduce(data.buffer, Reduction::kSum, kInfo).wait();

      const auto sum = static_cast<float>(size() * (size() + 1) / 2);
      EXPECT_EQ(data.value_at(0), sum);
      EXPECT_EQ(data.value_at(static_cast<std::int64_t>(count) - 1), sum);
    }
  });
}

TEST_F(NcclStreams, ASendComesAfterWhatItsStreamHolds) {
  world_->run([&](Communicator& comm) {
    OnDevice sent(1000, static_cast<float>(comm.rank() + 1)), received(1000, -1);
    const std::vector<Transfer> shift = {
        {true, (comm.rank() + 1) % size(), sent.buffer, kInfo},
        {false, (comm.rank() + size() - 1) % size(), received.buffer, kInfo}};

    comm.send_recv(shift).wait();

    EXPECT_EQ(received.value_at(999), static_cast<float>((comm.rank() + size() - 1) % size() + 1));
  });
}

// Several are under way at once, each on a stream of its own, and are waited for the other way.
TEST_F(NcclStreams, CallsUnderWayOnSeveralStreamsKeepTheirData) {
  world_->run([&](Communicator& comm) {
    std::vector<std::unique_ptr<OnDevice>> data;
    std::vector<Work> works;
    for (int number = 0; number < 4; ++number) {
      data.push_back(std::make_unique<OnDevice>(10'000, static_cast<float>(number + comm.rank())));
      works.push_back(comm.all_reduce(data.back()->buffer, Reduction::kMax, kInfo));
    }
    while (!works.empty()) works.pop_back();

    for (int number = 0; number < 4; ++number)
      EXPECT_EQ(data[static_cast<std::size_t>(number)]->value_at(5000),
                static_cast<float>(number + size() - 1));
  });
}

TEST_F(NcclStreams, BuffersOfAnotherDeviceOrOfTheHostOnAStreamAreRefused) {
  world_->run([&](Communicator& comm) {
    std::vector<float> values(8);
    Buffer elsewhere = buffer_of_floats(values), on_stream = elsewhere;
    elsewhere.device = {Device::Kind::kCuda, 1};
    on_stream.stream = &values;
    EXPECT_THROW(comm.all_reduce(elsewhere, Reduction::kSum, kInfo).wait(), UsageError);
    EXPECT_THROW(comm.all_reduce(on_stream, Reduction::kSum, kInfo).wait(), UsageError);
    EXPECT_THROW(comm.send(elsewhere, 0, kInfo).wait(), UsageError);
  });
}

// Negative control of the stand-in: it hands out what nobody has written, and refuses the host's
// memory.
TEST_F(NcclStreams, TheStandInRunsNothingEarlyAndRefusesMemoryOfTheHost) {
  OnDevice late(100, 3);
  EXPECT_NE(late.value_at(0), 3);
  std::vector<std::byte> host(64);
  EXPECT_THROW(gpu().copy(late.buffer.data, host.data(), 64, nullptr), GpuError);
  GatheredReduction task{.gathered = late.buffer.data, .output = host.data(), .count = 4};
  EXPECT_THROW(gpu().reduce(task, nullptr), GpuError);
  world_->run([](Communicator& comm) { comm.barrier(kInfo); });
}

}  // namespace
}  // namespace isoshard
