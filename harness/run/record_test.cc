// SPDX-License-Identifier: Apache-2.0
// Claims about recorded runs: what a value passes, and what a launcher and a transport must have.
#include "harness/run/record.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "core/base/error.h"
#include "core/comm/shm/shm_world.h"
#include "core/comm/thread/thread_world.h"
#include "harness/testing/synthetic.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

using synthetic::layout_of;
using synthetic::site;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// Two ranks that record their own numbers at a tap.
RunSpec two_ranks() {
  RunSpec spec;
  spec.name = "two";
  spec.mesh = MeshShape({{Axis::kDp, 2}});
  spec.body = [](Rank& rank, Sink& sink) {
    rank.comm().barrier({});
    const Site where = site(RecordKind::kActivation, "x", layout_of({2}, {shard(Axis::kDp, 0)}));
    (void)sink.on_activation(where, at::full({1}, rank.rank(), at::kFloat));
  };
  return spec;
}

float kept(const Trace& trace, std::size_t rank) {
  const RankTrace& own = trace.ranks.at(rank);
  const Record& record = own.records.at(0);
  float value = 0;
  std::memcpy(&value, own.arena->data() + record.offset, sizeof value);
  return value;
}

TEST(SinkChain, ObserversSeeWhatTheFaultMadeAndTheEndRecordsIt) {
  RecordOptions options;
  options.keep = Keep::kEverything;
  options.arena = std::make_shared<Arena>(1 << 20, "t");
  Recorder end(options);
  std::vector<float> seen;
  const SinkChain chain(
      [](const Site&, const at::Tensor& value) { return value + 1; },
      {[&](const Site&, const at::Tensor& value) { seen.push_back(value.item<float>()); }}, end);

  const at::Tensor passed = chain.head().on_activation(
      site(RecordKind::kActivation, "x", layout_of({1})), at::zeros({1}));

  const RankTrace trace = end.finish();
  EXPECT_EQ(passed.item<float>(), 1);
  EXPECT_THAT(seen, ElementsAre(1.0F));
  float recorded = 0;
  std::memcpy(&recorded, trace.arena->data() + trace.records.at(0).offset, sizeof recorded);
  EXPECT_EQ(recorded, 1);
}

TEST(SinkChain, IsItsEndWhereNothingStandsBefore) {
  Recorder end{RecordOptions{}};

  const SinkChain chain({}, {}, end);

  EXPECT_EQ(&chain.head(), &end);
}

TEST(Record, BringsBackTheTracesOfAllRanksInOrder) {
  RunSpec spec = two_ranks();
  spec.mutation = [](int rank) -> TapMutation {
    return [rank](const Site&, const at::Tensor& value) { return value + 10 * rank; };
  };

  const Trace trace = record(forked_launcher(), spec, {});

  ASSERT_EQ(trace.ranks.size(), 2U);
  EXPECT_EQ(trace.subject, "two");
  EXPECT_EQ(kept(trace, 0), 0);
  EXPECT_EQ(kept(trace, 1), 11);
}

TEST(Record, OneProcessMayBeAllRanks) {
  RunSpec spec = two_ranks();
  spec.body = {};
  spec.body_of_all = [](Rank& process, std::span<Sink* const> sinks) {
    ASSERT_EQ(process.size(), 1);
    for (std::size_t rank = 0; rank < sinks.size(); ++rank) {
      sinks[rank]->on_record(site(RecordKind::kGrad, "x", layout_of({2}, {shard(Axis::kDp, 0)})),
                             at::full({1}, static_cast<double>(rank), at::kFloat));
    }
  };

  const Trace trace = record(forked_launcher(), spec, {});

  ASSERT_EQ(trace.ranks.size(), 2U);
  EXPECT_EQ(kept(trace, 1), 1);
}

TEST(Record, RefusesASpecThatDoesNotSayWhatARankDoes) {
  EXPECT_THAT([] { (void)record(forked_launcher(), {.name = "empty"}, {}); },
              ThrowsMessage<UsageError>(HasSubstr("empty: a run needs the functions make")));
}

TEST(Record, TakesTheTransportOfTheSpec) {
  int worlds = 0;
  RunSpec spec = two_ranks();
  spec.transport = shm_transport();
  spec.transport.make = [&, inner = spec.transport.make](int num_ranks, ReductionOrder order) {
    ++worlds;
    return inner(num_ranks, order);
  };

  (void)record(forked_launcher(), spec, {});

  EXPECT_EQ(worlds, 1);
}

TEST(Record, ForkedRanksRefuseATransportOfThreads) {
  RunSpec spec = two_ranks();
  spec.transport = thread_transport();

  EXPECT_THAT([&] { (void)record(forked_launcher(), spec, {}); },
              ThrowsMessage<UsageError>(HasSubstr("must cross processes, got thread")));
}

/// A launcher of ranks somewhere else.
class Distant final : public Launcher {
 public:
  [[nodiscard]] std::string_view name() const noexcept override { return "distant"; }
  [[nodiscard]] bool shares_memory() const noexcept override { return false; }
  [[nodiscard]] std::unique_ptr<RunningWorld> launch(WorldOptions, Body) override {
    throw InfrastructureError("launched");
  }
};

TEST(Record, KeptTensorsNeedALauncherThatSharesMemory) {
  Distant distant;

  EXPECT_THAT([&] { (void)record(distant, two_ranks(), {.keep = Keep::kEverything}); },
              ThrowsMessage<NotBuiltError>(HasSubstr("got distant")));
  EXPECT_THAT([&] { (void)record(distant, two_ranks(), {.keep = Keep::kNothing}); },
              ThrowsMessage<InfrastructureError>(HasSubstr("launched")));
}

}  // namespace
}  // namespace isoshard
