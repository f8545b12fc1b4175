// SPDX-License-Identifier: Apache-2.0
/// Every collective on a device's memory gives what it gives on the host's, and the backend below
/// sees host memory alone.
#include "core/comm/staged/staged_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <numeric>
#include <vector>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};
constexpr int kRanks = 3;
using Values = std::vector<float>;

/// Memory of a device is the host's with every bit inverted: who reads it as the host's reads
/// nonsense.
void invert(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) to[i] = ~from[i];
}

DeviceCopies inverting_copies() {
  return {.to_host = [](std::byte* host, const std::byte* device, std::size_t bytes,
                        const Device&) { invert(host, device, bytes); },
          .to_device = [](std::byte* device, const std::byte* host, std::size_t bytes,
                          const Device&) { invert(device, host, bytes); }};
}

/// A tensor of either kind of memory.
class Tensor {
 public:
  Tensor(Values values, bool on_device) : values_(std::move(values)), on_device_(on_device) {
    if (on_device_) flip();
  }
  [[nodiscard]] Buffer buffer() {
    Buffer buffer{reinterpret_cast<std::byte*>(values_.data()),
                  static_cast<std::int64_t>(values_.size()), Dtype::kFloat32};
    if (on_device_) buffer.device = {Device::Kind::kCuda, 1};
    if (on_device_) buffer.stream = this;
    return buffer;
  }
  [[nodiscard]] Values values() {
    if (on_device_) flip();
    Values result = values_;
    if (on_device_) flip();
    return result;
  }

 private:
  void flip() {
    auto* const bytes = reinterpret_cast<std::byte*>(values_.data());
    invert(bytes, bytes, values_.size() * sizeof(float));
  }
  Values values_;
  bool on_device_;
};

Values numbers(int rank, std::size_t count) {
  Values values(count);
  std::iota(values.begin(), values.end(), 100.0F * static_cast<float>(rank + 1));
  return values;
}

using Body = std::function<Values(Communicator& comm, bool on_device)>;

struct Call {
  const char* name;
  Body body;
};

const std::array<std::int64_t, 3> kCounts{1, 0, 4};

const Call kCalls[] = {
    {"AllReduce",
     [](Communicator& comm, bool on_device) {
       Tensor data(numbers(comm.rank(), 7), on_device);
       comm.all_reduce(data.buffer(), Reduction::kAvg, kInfo).wait();
       return data.values();
     }},
    {"AllGather",
     [](Communicator& comm, bool on_device) {
       Tensor in(numbers(comm.rank(), 2), on_device);
       Tensor out(Values(6), on_device);
       comm.all_gather(in.buffer(), out.buffer(), kInfo).wait();
       return out.values();
     }},
    {"ReduceScatter",
     [](Communicator& comm, bool on_device) {
       Tensor in(numbers(comm.rank(), 6), on_device);
       Tensor out(Values(2), on_device);
       comm.reduce_scatter(in.buffer(), out.buffer(), Reduction::kMax, kInfo).wait();
       return out.values();
     }},
    {"AllGatherUneven",
     [](Communicator& comm, bool on_device) {
       const auto own = static_cast<std::size_t>(kCounts[static_cast<std::size_t>(comm.rank())]);
       Tensor in(numbers(comm.rank(), own), on_device);
       Tensor out(Values(5), on_device);
       comm.all_gather_uneven(in.buffer(), out.buffer(), kCounts, kInfo).wait();
       return out.values();
     }},
    {"ReduceScatterUneven",
     [](Communicator& comm, bool on_device) {
       const auto own = static_cast<std::size_t>(kCounts[static_cast<std::size_t>(comm.rank())]);
       Tensor in(numbers(comm.rank(), 5), on_device);
       Tensor out(Values(own), on_device);
       comm.reduce_scatter_uneven(in.buffer(), out.buffer(), kCounts, Reduction::kSum, kInfo)
           .wait();
       return out.values();
     }},
    {"AllToAll",
     [](Communicator& comm, bool on_device) {
       Tensor in(numbers(comm.rank(), 6), on_device);
       Tensor out(Values(6), on_device);
       comm.all_to_all(in.buffer(), out.buffer(), kInfo).wait();
       return out.values();
     }},
    {"Broadcast",
     [](Communicator& comm, bool on_device) {
       Tensor data(numbers(comm.rank(), 4), on_device);
       comm.broadcast(data.buffer(), 1, kInfo).wait();
       return data.values();
     }},
    {"SendRecv",
     [](Communicator& comm, bool on_device) {
       Tensor out(numbers(comm.rank(), 4), on_device);
       Tensor in(Values(4), on_device);
       const int next = (comm.rank() + 1) % kRanks;
       const int before = (comm.rank() + kRanks - 1) % kRanks;
       const std::array<Transfer, 2> transfers{Transfer{true, next, out.buffer(), kInfo},
                                               Transfer{false, before, in.buffer(), kInfo}};
       comm.send_recv(transfers).wait();
       return in.values();
     }},
    {"SendThenRecv",
     [](Communicator& comm, bool on_device) {
       Tensor data(numbers(comm.rank(), 4), on_device);
       if (comm.rank() == 0) comm.send(data.buffer(), 2, kInfo).wait();
       if (comm.rank() == 2) comm.recv(data.buffer(), 0, kInfo).wait();
       return data.values();
     }},
    {"GroupThatWasSplit",
     [](Communicator& comm, bool on_device) {
       const std::unique_ptr<Communicator> group = comm.split(comm.rank() == 0 ? 0 : 1, 0);
       Tensor data(numbers(comm.rank(), 4), on_device);
       group->all_reduce(data.buffer(), Reduction::kSum, kInfo).wait();
       return data.values();
     }},
};

std::vector<Values> on_every_rank(const Body& body, bool on_device) {
  ThreadWorld world(kRanks);
  std::vector<Values> results(kRanks);
  world.run([&](Communicator& comm) {
    const std::unique_ptr<Communicator> own = staged(comm, inverting_copies());
    results[static_cast<std::size_t>(comm.rank())] = body(*own, on_device);
  });
  return results;
}

class StagedCommunicator : public testing::TestWithParam<Call> {};

TEST_P(StagedCommunicator, GivesOnADeviceWhatItGivesInHostMemory) {
  const std::vector<Values> host = on_every_rank(GetParam().body, false);
  const std::vector<Values> device = on_every_rank(GetParam().body, true);

  EXPECT_EQ(device, host);
  EXPECT_NE(host[2], numbers(2, host[2].size()));  // the call did something
}
INSTANTIATE_TEST_SUITE_P(Every, StagedCommunicator, testing::ValuesIn(kCalls),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(StagedCommunicatorErrors, AreThoseOfTheBackendAndLeaveTheDeviceAlone) {
  ThreadWorld world(2);

  world.run([&](Communicator& comm) {
    const std::unique_ptr<Communicator> own = staged(comm, inverting_copies());
    Tensor data(numbers(comm.rank(), comm.rank() == 0 ? 3 : 4), true);
    const Values before = data.values();
    EXPECT_THAT([&] { own->all_reduce(data.buffer(), Reduction::kSum, kInfo).wait(); },
                ThrowsMessage<CommError>(HasSubstr("all_reduce")));
    EXPECT_EQ(data.values(), before);
  });
}

TEST(StagedCommunicatorErrors, ANegativeCountIsRefusedAsOnTheHost) {
  ThreadWorld world(1);

  world.run([&](Communicator& comm) {
    const std::unique_ptr<Communicator> own = staged(comm, inverting_copies());
    Tensor data(numbers(0, 3), true);
    Buffer buffer = data.buffer();
    buffer.count = -1;
    EXPECT_THROW(own->all_reduce(buffer, Reduction::kSum, kInfo).wait(), ShapeError);
  });
}

}  // namespace
}  // namespace isoshard
