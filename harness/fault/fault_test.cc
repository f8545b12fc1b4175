// SPDX-License-Identifier: Apache-2.0
/// A fault changes exactly the calls and segments it names, and the probe says so.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <set>
#include <vector>

#include "core/comm/thread/thread_world.h"
#include "harness/fault/collective_fault.h"
#include "harness/fault/random_delays.h"

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
  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override {
    return inner_.all_reduce(data, reduction, info);
  }
  Work all_gather(ConstBuffer in, Buffer out, const CallInfo& info) override {
    return inner_.all_gather(in, out, info);
  }
  Work reduce_scatter(ConstBuffer in, Buffer out, Reduction r, const CallInfo& info) override {
    return inner_.reduce_scatter(in, out, r, info);
  }
  using Communicator::all_to_all;
  Work all_gather_uneven(ConstBuffer in, Buffer out, std::span<const std::int64_t> counts,
                         const CallInfo& info) override {
    return inner_.all_gather_uneven(in, out, counts, info);
  }
  Work reduce_scatter_uneven(ConstBuffer in, Buffer out, std::span<const std::int64_t> counts,
                             Reduction r, const CallInfo& info) override {
    return inner_.reduce_scatter_uneven(in, out, counts, r, info);
  }
  Work all_to_all(ConstBuffer in, std::span<const std::int64_t> in_counts, Buffer out,
                  std::span<const std::int64_t> out_counts, const CallInfo& info) override {
    return inner_.all_to_all(in, in_counts, out, out_counts, info);
  }
  Work send(ConstBuffer data, int to, const CallInfo& info) override {
    return inner_.send(data, to, info);
  }
  Work recv(Buffer data, int from, const CallInfo& info) override {
    return inner_.recv(data, from, info);
  }
  Work send_recv(std::span<const Transfer> transfers) override {
    return inner_.send_recv(transfers);
  }
  Work broadcast(Buffer data, int root, const CallInfo& info) override {
    return inner_.broadcast(data, root, info);
  }
  void barrier(const CallInfo& info) override { inner_.barrier(info); }
  std::unique_ptr<Communicator> split(int color, int key) override {
    return inner_.split(color, key);
  }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }

 private:
  Communicator& inner_;
};

constexpr int kRanks = 3;

// Every rank contributes {1, 1, 1, 1}; returns what rank 0 holds after a decorated sum over one
// group split from the world.
std::array<std::int32_t, 4> sum_with(std::shared_ptr<const CollectiveFault> fault,
                                     std::span<const Segment> segments, const FaultProbe& probe,
                                     Purpose purpose = Purpose::kGradReduce, MeshShape shape = {}) {
  std::array<std::int32_t, 4> result{};
  ThreadWorld world(kRanks);
  world.run([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), kRanks);
    auto decorated = decorate_with_fault(std::make_unique<Borrowed>(comm), fault, probe, shape);
    auto group = decorated->split(0, comm.rank());
    std::array<std::int32_t, 4> data = {1, 1, 1, 1};
    group
        ->all_reduce({reinterpret_cast<std::byte*>(data.data()), 4, Dtype::kInt32}, Reduction::kSum,
                     {purpose, Axis::kDp, segments})
        .wait();
    if (comm.rank() == 0) result = data;
  });
  return result;
}

const std::vector<Segment> kTwoSegments = {{"a.weight", ParamClass::kMatrix, 0, 1},
                                           {"norm.weight", ParamClass::kNorm, 1, 3}};

std::shared_ptr<const CollectiveFault> skip_norms() {
  return skip_segments([](const CallInfo& info, const Segment* segment) {
    return info.purpose == Purpose::kGradReduce && segment != nullptr &&
           segment->param_class == ParamClass::kNorm;
  });
}

bool is_norm(const CallInfo& info, const Segment* segment) {
  return info.purpose == Purpose::kGradReduce && segment != nullptr &&
         segment->param_class == ParamClass::kNorm;
}

void multiply(Buffer part, std::int32_t factor) {
  auto* values = reinterpret_cast<std::int32_t*>(part.data);
  for (std::int64_t i = 0; i < part.count; ++i) values[i] *= factor;
}

TEST(ChangeSegments, EditsTheResultOfTheNamedPieceOnly) {
  const FaultProbe probe;
  SegmentChange change{.matches = is_norm};
  change.after = [](const InterceptedCall&, ConstBuffer input, Buffer result) {
    EXPECT_EQ(input.count, 3);
    EXPECT_EQ(*reinterpret_cast<const std::int32_t*>(input.data), 1) << "what this rank gave";
    multiply(result, 2);
  };

  const auto result = sum_with(change_segments(change), kTwoSegments, probe);

  EXPECT_EQ(result, (std::array<std::int32_t, 4>{3, 6, 6, 6}));
  EXPECT_EQ(probe.count(), kRanks);
}

TEST(ChangeSegments, MayChangeWhatARankGives) {
  const FaultProbe probe;
  SegmentChange change{.matches = is_norm};
  change.before = [](const InterceptedCall& call, Buffer part) {
    multiply(part, call.comm->rank() == 0 ? 10 : 0);
  };

  EXPECT_EQ(sum_with(change_segments(change), kTwoSegments, probe),
            (std::array<std::int32_t, 4>{3, 10, 10, 10}));
}

TEST(ChangeSegments, CountsAsFiredOnlyWhereItChangesSomething) {
  const FaultProbe by_one, of_one_rank;
  SegmentChange change{.matches = is_norm};
  change.after = [](const InterceptedCall&, ConstBuffer, Buffer result) { multiply(result, 1); };
  SegmentChange given{.matches = is_norm};
  given.before = [](const InterceptedCall& call, Buffer part) {
    multiply(part, call.comm->rank() == 0 ? 1 : 0);
  };

  (void)sum_with(change_segments(change), kTwoSegments, by_one);
  (void)sum_with(change_segments(given), kTwoSegments, of_one_rank);

  EXPECT_EQ(by_one.count(), 0) << "a factor of 1 changes nothing";
  EXPECT_EQ(of_one_rank.count(), kRanks - 1) << "rank 0 gives what it should";
}

// Rank r owns r + 1 of the 6 elements; the second segment, [2, 6), is in the blocks of ranks 1 and
// 2.
TEST(ChangeSegments, EditsTheOwnBlockOfAnUnevenReduceScatter) {
  const FaultProbe probe;
  SegmentChange change{.matches = is_norm};
  change.of_own_blocks = true;
  change.after = [](const InterceptedCall&, ConstBuffer, Buffer result) { multiply(result, 2); };
  const std::vector<Segment> segments = {{"a.weight", ParamClass::kMatrix, 0, 2},
                                         {"norm.weight", ParamClass::kNorm, 2, 4}};
  const std::array<std::int64_t, 3> counts = {1, 2, 3};
  ThreadWorld world(kRanks);

  world.run([&](Communicator& comm) {
    ASSERT_EQ(comm.size(), kRanks);
    auto decorated =
        decorate_with_fault(std::make_unique<Borrowed>(comm), change_segments(change), probe);
    std::array<std::int32_t, 6> input = {1, 1, 1, 1, 1, 1};
    std::array<std::int32_t, 3> block{};
    const auto of = [](std::int32_t* data, std::int64_t count) {
      return Buffer{reinterpret_cast<std::byte*>(data), count, Dtype::kInt32};
    };

    decorated
        ->reduce_scatter_uneven(of(input.data(), 6), of(block.data(), comm.rank() + 1), counts,
                                Reduction::kSum, {Purpose::kGradReduce, Axis::kDp, segments})
        .wait();

    const std::array<std::array<std::int32_t, 3>, 3> expected = {{{3, 0, 0}, {3, 6, 0}, {6, 6, 6}}};
    EXPECT_EQ(block, expected.at(static_cast<std::size_t>(comm.rank())));
  });

  EXPECT_EQ(probe.count(), 2) << "rank 0 has nothing of it";
}

TEST(ChangeSegments, LeavesOtherCallsAlone) {
  const FaultProbe probe;
  SegmentChange change{.matches = is_norm};
  change.after = [](const InterceptedCall&, ConstBuffer, Buffer result) { multiply(result, 2); };

  EXPECT_EQ(sum_with(change_segments(change), kTwoSegments, probe, Purpose::kClipNorm),
            (std::array<std::int32_t, 4>{3, 3, 3, 3}));
  EXPECT_EQ(sum_with(change_segments(change), {}, probe), (std::array<std::int32_t, 4>{3, 3, 3, 3}))
      << "a call that names no segment";
  EXPECT_EQ(probe.count(), 0);
}

TEST(ChangeSegments, MayCallAnotherGroup) {
  const FaultProbe probe;
  SegmentChange change{
      .matches = [](const CallInfo& info, const Segment*) { return info.axis == Axis::kDp; }};
  change.after = [](const InterceptedCall& call, ConstBuffer, Buffer result) {
    EXPECT_EQ(call.mesh->coordinate(Axis::kDp), call.mesh->world().rank());
    call.mesh->group(Axis::kDp)
        .all_reduce(result, Reduction::kSum, {Purpose::kGradReduce, Axis::kDp, {}})
        .wait();
    call.mesh->group(Axis::kDp)
        .all_reduce(result, Reduction::kMax, {Purpose::kGradReduce, Axis::kDp, {}})
        .wait();
  };

  EXPECT_EQ(sum_with(change_segments(change), {}, probe, Purpose::kGradReduce,
                     MeshShape({{Axis::kDp, kRanks}})),
            (std::array<std::int32_t, 4>{9, 9, 9, 9}));
}

TEST(SkipSegments, LeavesOnlyTheNamedPieceOfABucketUnreduced) {
  const FaultProbe probe;
  EXPECT_EQ(sum_with(skip_norms(), kTwoSegments, probe), (std::array<std::int32_t, 4>{3, 1, 1, 1}));
  EXPECT_EQ(probe.count(), kRanks);
}

// Each of 3 ranks r gives r + 1 in 3 blocks of 2; the piece "kept" is the second element of the
// first block and the first of the second.
TEST(SkipSegments, OfAReduceScatterKeepWhatTheRankItselfGave) {
  const std::array<Segment, 3> segments = {Segment{"a", ParamClass::kMatrix, 0, 1},
                                           Segment{"kept", ParamClass::kMatrix, 1, 2},
                                           Segment{"b", ParamClass::kMatrix, 3, 3}};
  std::array<std::array<std::int32_t, 2>, kRanks> results{};
  const FaultProbe probe;
  const auto fault = skip_segments([](const CallInfo&, const Segment* segment) {
    return segment != nullptr && segment->name == "kept";
  });
  ThreadWorld world(kRanks);

  world.run([&](Communicator& comm) {
    ASSERT_EQ(comm.size(), kRanks);
    const auto group = decorate_with_fault(std::make_unique<Borrowed>(comm), fault, probe);
    std::array<std::int32_t, 6> given;
    given.fill(comm.rank() + 1);
    std::array<std::int32_t, 2>& own = results.at(static_cast<std::size_t>(comm.rank()));
    group
        ->reduce_scatter({reinterpret_cast<std::byte*>(given.data()), 6, Dtype::kInt32},
                         {reinterpret_cast<std::byte*>(own.data()), 2, Dtype::kInt32},
                         Reduction::kSum, {Purpose::kGradReduce, Axis::kDp, segments})
        .wait();
  });

  EXPECT_EQ(results[0], (std::array<std::int32_t, 2>{6, 1}));
  EXPECT_EQ(results[1], (std::array<std::int32_t, 2>{2, 6}));
  EXPECT_EQ(results[2], (std::array<std::int32_t, 2>{6, 6}));
  EXPECT_EQ(probe.count(), kRanks);
}

TEST(SkipSegments, OtherPurposesPassUntouchedAndDoNotCount) {
  const FaultProbe probe;
  EXPECT_EQ(sum_with(skip_norms(), kTwoSegments, probe, Purpose::kParamGather),
            (std::array<std::int32_t, 4>{3, 3, 3, 3}));
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

// Never applies: what a decorated communicator does is then exactly what the inner one does.
class NoFault final : public CollectiveFault {
 public:
  bool applies(const InterceptedCall&) const override { return false; }
  Work apply(const InterceptedCall& call) const override { return call.pass(); }
};

TEST(FaultyCommunicator, ForwardsBlocksAndTransfersUnchanged) {
  ThreadWorld world(2);
  world.run([](Communicator& inner) {
    auto comm = decorate_with_fault(std::make_unique<Borrowed>(inner), std::make_shared<NoFault>(),
                                    FaultProbe());
    const int rank = comm->rank();
    const int peer = 1 - rank;
    const auto of = [](std::int32_t* data, std::int64_t count) {
      return Buffer{reinterpret_cast<std::byte*>(data), count, Dtype::kInt32};
    };
    const CallInfo info{Purpose::kPipeForward, Axis::kPp};
    const std::array<std::int64_t, 2> counts = {1, 2};
    const std::array<std::int64_t, 2> received = {rank + 1, rank + 1};
    std::array<std::int32_t, 3> input = {10 * rank, 10 * rank + 1, 10 * rank + 2};
    std::array<std::int32_t, 3> gathered{};
    std::array<std::int32_t, 4> exchanged{};
    std::array<std::int32_t, 2> block{};
    std::array<std::int32_t, 2> swapped{};

    comm->all_gather_uneven(of(input.data(), rank + 1), of(gathered.data(), 3), counts, info)
        .wait();
    comm->reduce_scatter_uneven(of(input.data(), 3), of(block.data(), rank + 1), counts,
                                Reduction::kMax, info)
        .wait();
    comm->all_to_all(of(input.data(), 3), counts, of(exchanged.data(), 2 * (rank + 1)), received,
                     info)
        .wait();
    if (rank == 0) comm->send(of(input.data(), 1), 1, info).wait();
    if (rank == 1) comm->recv(of(swapped.data() + 1, 1), 0, info).wait();
    const std::array<Transfer, 2> transfers = {Transfer{true, peer, of(input.data() + 2, 1), info},
                                               Transfer{false, peer, of(swapped.data(), 1), info}};
    comm->send_recv(transfers).wait();

    EXPECT_EQ(gathered, (std::array<std::int32_t, 3>{0, 10, 11}));
    EXPECT_EQ(block, (rank == 0 ? std::array<std::int32_t, 2>{10, 0}
                                : std::array<std::int32_t, 2>{11, 12}));
    EXPECT_EQ(exchanged, (rank == 0 ? std::array<std::int32_t, 4>{0, 10, 0, 0}
                                    : std::array<std::int32_t, 4>{1, 2, 11, 12}));
    EXPECT_EQ(swapped,
              (rank == 0 ? std::array<std::int32_t, 2>{12, 0} : std::array<std::int32_t, 2>{2, 0}));
  });
  EXPECT_EQ(world.journal().num_calls(0, CollectiveOp::kSend, Purpose::kPipeForward), 2U);
  EXPECT_EQ(world.journal().num_calls(0, CollectiveOp::kAllToAll, Purpose::kPipeForward), 1U);
}

TEST(RandomDelays, AreAFunctionOfSeedRunRankAndCall) {
  std::set<std::int64_t> seen;
  for (std::uint32_t call = 0; call < 100; ++call) {
    const auto delay = random_delay(7, 2, 1, call);
    EXPECT_EQ(delay, random_delay(7, 2, 1, call));
    EXPECT_GE(delay.count(), 0);
    EXPECT_LE(delay, kLongestDelay);
    seen.insert(delay.count());
  }
  EXPECT_GT(seen.size(), 50U) << "calls wait for different times";
  EXPECT_NE(random_delay(7, 2, 1, 0), random_delay(7, 2, 2, 0));
  EXPECT_NE(random_delay(7, 2, 1, 0), random_delay(7, 3, 1, 0));
  EXPECT_NE(random_delay(7, 2, 1, 0), random_delay(8, 2, 1, 0));
}

TEST(RandomDelays, ChangeNoResultAndDoNotCountAsFired) {
  const FaultProbe probe;

  const auto result = sum_with(random_delays(7, 2), kTwoSegments, probe);

  EXPECT_EQ(result, (std::array<std::int32_t, 4>{3, 3, 3, 3}));
  EXPECT_EQ(probe.count(), 0);
}

}  // namespace
}  // namespace isoshard
