// SPDX-License-Identifier: Apache-2.0
// A run of several ranks, put together, is what one process would have recorded.
#include "harness/judge/assembled.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;

const RecordKey kKey{0, RecordKind::kActivationGrad, "x", 0};

Trace run_on_two(const Layout& layout, double scale,
                 const std::function<at::Tensor(int rank)>& local) {
  return run(
      MeshShape({{Axis::kTp, 2}}), nullptr,
      [&](Sink& sink, int rank) {
        sink.on_record(site(RecordKind::kActivationGrad, "x", layout, scale), local(rank));
      },
      Keep::kEverything);
}

TEST(Assembled, KeepsEveryBitAndTheScaleThatAllRanksDeclare) {
  const at::Tensor whole = values({5, 4}, 1);
  const Trace sharded = run_on_two(layout_of({5, 4}, {shard(Axis::kTp, 1)}), 3, [&](int rank) {
    return whole.narrow(1, 2 * rank, 2).contiguous();
  });

  const Reference reference(assembled(sharded));

  EXPECT_TRUE(at::equal(tensor_of(reference.tensor(kKey)), whole));
  EXPECT_EQ(reference.find(kKey)->grad_scale, 3);
}

// As judge makes it of a run's partial sum: added in fp64, rounded as a record of that scale is.
// 1/3 of the sum is another number here.
TEST(Assembled, LeavesPartialSumsInTheScaleThatAllRanksDeclare) {
  const Trace partial_sums = run_on_two(layout_of({6}, {partial(Axis::kTp)}), 3, [](int rank) {
    return values({6}, rank + 1, at::kBFloat16);
  });

  const Reference reference(assembled(partial_sums));

  EXPECT_TRUE(
      at::equal(tensor_of(reference.tensor(kKey)), tensor_of(partial_sums.assemble(kKey, 3))));
  EXPECT_EQ(reference.find(kKey)->grad_scale, 3);
}

/// Names of one kind in the order in which they stand, when rank 0 of a pipeline has the embedding
/// and the layers `first` of a model, and rank 1 the others, a norm and a head.
std::vector<std::string> order_of(RecordKind kind, const std::vector<std::string>& first,
                                  const std::vector<std::string>& second) {
  const Trace pipeline = run(
      MeshShape({{Axis::kPp, 2}}), nullptr,
      [&](Sink& sink, int rank) {
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
          for (const std::string& name : rank == 0 ? first : second)
            sink.on_record(site(kind, name, layout_of({2})), values({2}, 1));
        }
      },
      Keep::kEverything);
  const Trace whole = assembled(pipeline);
  std::vector<std::string> names;
  for (const Record& record : whole.ranks.front().records)
    names.push_back(record.key.name + "#" + std::to_string(record.key.call));
  return names;
}

TEST(Assembled, ValuesOfAPipelineStandInTheOrderOfTheLayers) {
  EXPECT_THAT(
      order_of(RecordKind::kActivation, {"embed", "m.layers.0.a", "m.layers.0.b", "m.layers.2.a"},
               {"m.layers.1.a", "m.layers.10.a", "norm", "head"}),
      testing::ElementsAre("embed#0", "m.layers.0.a#0", "m.layers.0.b#0", "m.layers.1.a#0",
                           "m.layers.2.a#0", "m.layers.10.a#0", "norm#0", "head#0", "embed#1",
                           "m.layers.0.a#1", "m.layers.0.b#1", "m.layers.1.a#1", "m.layers.2.a#1",
                           "m.layers.10.a#1", "norm#1", "head#1"));
  EXPECT_THAT(
      order_of(RecordKind::kActivationGrad, {"m.layers.2.a", "m.layers.0.b", "embed"},
               {"head", "norm", "m.layers.3.a", "m.layers.1.a"}),
      testing::ElementsAre("head#0", "norm#0", "m.layers.3.a#0", "m.layers.2.a#0", "m.layers.1.a#0",
                           "m.layers.0.b#0", "embed#0", "head#1", "norm#1", "m.layers.3.a#1",
                           "m.layers.2.a#1", "m.layers.1.a#1", "m.layers.0.b#1", "embed#1"));
}

// Numbers of two stacks cannot be put in one order; ranks' own orders are what is left.
TEST(Assembled, NamesThatDoNotTellLeaveTheOrderOfTheRanks) {
  EXPECT_THAT(
      order_of(RecordKind::kActivation, {"encoder.5.a", "encoder.6.a"},
               {"decoder.0.a", "decoder.1.a"}),
      testing::ElementsAre("encoder.5.a#0", "decoder.0.a#0", "encoder.6.a#0", "decoder.1.a#0",
                           "encoder.5.a#1", "decoder.0.a#1", "encoder.6.a#1", "decoder.1.a#1"));
}

}  // namespace
}  // namespace isoshard
