// SPDX-License-Identifier: Apache-2.0
// A run of several ranks, put together, is what one process would have recorded.
#include "harness/judge/assembled.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

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

// As judge makes it of a run's partial sum: divided, added in fp64, rounded. 1/3 of the sum is
// another number here.
TEST(Assembled, DividesTheScaleOutOfPartialSums) {
  const Trace partial_sums = run_on_two(layout_of({6}, {partial(Axis::kTp)}), 3, [](int rank) {
    return values({6}, rank + 1, at::kBFloat16);
  });

  const Reference reference(assembled(partial_sums));

  EXPECT_TRUE(at::equal(tensor_of(reference.tensor(kKey)), tensor_of(partial_sums.assemble(kKey))));
  EXPECT_EQ(reference.find(kKey)->grad_scale, 1);
}

}  // namespace
}  // namespace isoshard
