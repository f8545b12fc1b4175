// SPDX-License-Identifier: Apache-2.0
/// A fault changes exactly the calls and segments it names, and the probe says so.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "comm/thread/thread_world.h"
#include "harness/fault/collective_fault.h"

namespace isoshard {
namespace {

// A ThreadWorld owns its communicators; the decorator wants to own what it wraps.
class Borrowed final : public Communicator {
 public:
  explicit Borrowed(Communicator& inner) : inner_(inner) {}
  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  ReductionOrder reduction_order() const noexcept override { return inner_.reduction_order(); }
  int world_rank_of(int rank) const override { return inner_.world_rank_of(rank); }
  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override { return inner_.all_reduce(data, reduction, info); }
  Work all_gather(ConstBuffer in, Buffer out, const CallInfo& info) override { return inner_.all_gather(in, out, info); }
  Work reduce_scatter(ConstBuffer in, Buffer out, Reduction r, const CallInfo& info) override { return inner_.reduce_scatter(in, out, r, info); }
  Work broadcast(Buffer data, int root, const CallInfo& info) override { return inner_.broadcast(data, root, info); }
  void barrier(const CallInfo& info) override { inner_.barrier(info); }
  std::unique_ptr<Communicator> split(int color, int key) override { return inner_.split(color, key); }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }

 private:
  Communicator& inner_;
};

constexpr int kRanks = 3;

// Every rank contributes {1, 1, 1, 1}; returns what rank 0 holds after a decorated sum over one group split from the world.
std::array<std::int32_t, 4> sum_with(std::shared_ptr<const CollectiveFault> fault, std::span<const Segment> segments, const FaultProbe& probe,
                                     Purpose purpose = Purpose::kGradReduce) {
  std::array<std::int32_t, 4> result{};
  ThreadWorld world(kRanks);
  world.run([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), kRanks);
    auto decorated = decorate_with_fault(std::make_unique<Borrowed>(comm), fault, probe);
    auto group = decorated->split(0, comm.rank());
    std::array<std::int32_t, 4> data = {1, 1, 1, 1};
    group->all_reduce({reinterpret_cast<std::byte*>(data.data()), 4, Dtype::kInt32}, Reduction::kSum, {purpose, Axis::kDp, segments}).wait();
    if (comm.rank() == 0) result = data;
  });
  return result;
}

const std::vector<Segment> kTwoSegments = {{"a.weight", ParamClass::kMatrix, 0, 1}, {"norm.weight", ParamClass::kNorm, 1, 3}};

std::shared_ptr<const CollectiveFault> skip_norms() {
  return skip_segments([](const CallInfo& info, const Segment* segment) {
    return info.purpose == Purpose::kGradReduce && segment != nullptr && segment->param_class == ParamClass::kNorm;
  });
}

TEST(SkipSegments, LeavesOnlyTheNamedPieceOfABucketUnreduced) {
  const FaultProbe probe;
  EXPECT_EQ(sum_with(skip_norms(), kTwoSegments, probe), (std::array<std::int32_t, 4>{3, 1, 1, 1}));
  EXPECT_EQ(probe.count(), kRanks);
}

TEST(SkipSegments, OtherPurposesPassUntouchedAndDoNotCount) {
  const FaultProbe probe;
  EXPECT_EQ(sum_with(skip_norms(), kTwoSegments, probe, Purpose::kParamGather), (std::array<std::int32_t, 4>{3, 3, 3, 3}));
  EXPECT_EQ(probe.count(), 0);
}

TEST(SkipSegments, ACallOfWhichNothingIsLeftIsNotSent) {
  const FaultProbe probe;
  const auto skip_all = skip_segments([](const CallInfo&, const Segment*) { return true; });
  EXPECT_EQ(sum_with(skip_all, {}, probe), (std::array<std::int32_t, 4>{1, 1, 1, 1}));
  EXPECT_EQ(sum_with(skip_all, kTwoSegments, probe), (std::array<std::int32_t, 4>{1, 1, 1, 1}));
  EXPECT_EQ(probe.count(), 2 * kRanks);
}

TEST(FaultProbe, CountsAcrossForkedProcesses) {
  const FaultProbe probe;
  const pid_t child = fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    probe.fired();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);

  probe.fired();

  EXPECT_EQ(probe.count(), 2);
}

}  // namespace
}  // namespace isoshard
