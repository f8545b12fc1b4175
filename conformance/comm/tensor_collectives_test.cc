// SPDX-License-Identifier: Apache-2.0
/// Collectives on tensors: any strides, any dtype, and refusal of what would silently be wrong.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

constexpr CallInfo kInfo{Purpose::kRowParallelForward, Axis::kTp};

at::Tensor counting(int rank, at::IntArrayRef sizes, at::ScalarType type) {
  return (at::arange(c10::multiply_integers(sizes), at::kLong).remainder(17) + rank)
      .reshape(sizes)
      .to(type);
}

at::Tensor sum_of_counting(int num_ranks, at::IntArrayRef sizes, at::ScalarType type) {
  at::Tensor sum = counting(0, sizes, type);
  for (int rank = 1; rank < num_ranks; ++rank) sum += counting(rank, sizes, type);
  return sum;
}

class TensorCollectives : public testing::TestWithParam<int> {
 protected:
  void run(const std::function<void(Communicator&)>& body) {
    world_.run([&](Communicator& comm) {
      ASSERT_EQ(comm.size(), GetParam());
      body(comm);
    });
    for (int rank = 0; rank < GetParam(); ++rank) EXPECT_GT(world_.journal().num_calls(rank), 0U);
  }
  ThreadWorld world_{GetParam()};
};

TEST_P(TensorCollectives, AllReduceTakesAnyStrides) {
  run([&](Communicator& comm) {
    for (const auto type :
         {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort}) {
      at::Tensor storage = counting(comm.rank(), {6, 5, 4}, type);
      const at::Tensor untouched = storage.clone();
      // [4, 2, 6] with strides 1, 8, 20
      const at::Tensor view = storage.transpose(0, 2).slice(1, 1, 5, 2);
      ASSERT_FALSE(view.is_contiguous());

      all_reduce(comm, view, Reduction::kSum, kInfo).wait();

      const at::Tensor expected =
          sum_of_counting(comm.size(), {6, 5, 4}, type).transpose(0, 2).slice(1, 1, 5, 2);
      EXPECT_TRUE(at::equal(view, expected)) << type;
      EXPECT_TRUE(at::equal(storage.slice(1, 0, 5, 2), untouched.slice(1, 0, 5, 2)))
          << "elements outside the view changed";
    }
  });
}

TEST_P(TensorCollectives, AllReduceTakesScalarsAndEmptyTensors) {
  run([&](Communicator& comm) {
    at::Tensor scalar = at::scalar_tensor(comm.rank() + 1, at::kDouble);
    at::Tensor empty = at::empty({0, 3});

    all_reduce(comm, scalar, Reduction::kMax, kInfo).wait();
    all_reduce(comm, empty, Reduction::kSum, kInfo).wait();

    EXPECT_EQ(scalar.item<double>(), comm.size());
    EXPECT_EQ(empty.sizes(), at::IntArrayRef({0, 3}));
  });
}

TEST_P(TensorCollectives, AllGatherAndReduceScatterCutAlongDimZero) {
  run([&](Communicator& comm) {
    // [3, 5], not contiguous
    const at::Tensor block = counting(comm.rank(), {5, 3}, at::kFloat).t();
    std::vector<at::Tensor> blocks;
    for (int rank = 0; rank < comm.size(); ++rank)
      blocks.push_back(counting(rank, {5, 3}, at::kFloat).t());

    const at::Tensor all = all_gather(comm, block, kInfo);
    const at::Tensor part = reduce_scatter(comm, all, Reduction::kSum, kInfo);

    EXPECT_TRUE(at::equal(all, at::cat(blocks)));
    EXPECT_TRUE(at::equal(part, block * comm.size()));
  });
}

TEST_P(TensorCollectives, BroadcastWritesThroughAView) {
  run([&](Communicator& comm) {
    at::Tensor storage = counting(comm.rank(), {4, 6}, at::kByte);

    broadcast(comm, storage.t(), comm.size() - 1, kInfo).wait();

    EXPECT_TRUE(at::equal(storage, counting(comm.size() - 1, {4, 6}, at::kByte)));
  });
}

TEST_P(TensorCollectives, RefusesWhatWouldBeSilentlyWrong) {
  run([&](Communicator& comm) {
    at::Tensor leaf = at::ones({2, 2}).requires_grad_();
    at::Tensor expanded = at::ones({1, 3}).expand({4, 3});

    EXPECT_THROW((void)all_reduce(comm, leaf, Reduction::kSum, kInfo), ShapeError);
    EXPECT_THROW((void)all_gather(comm, leaf, kInfo), ShapeError);
    EXPECT_THROW((void)all_reduce(comm, expanded, Reduction::kSum, kInfo), ShapeError);
    EXPECT_THROW((void)reduce_scatter(comm, at::scalar_tensor(1.0), Reduction::kAvg, kInfo),
                 ShapeError);
    if (comm.size() > 1) {
      EXPECT_THROW(
          (void)reduce_scatter(comm, at::ones({comm.size() + 1, 2}), Reduction::kAvg, kInfo),
          ShapeError);
    }
    EXPECT_THROW((void)all_reduce(comm, at::ones({2}, at::kComplexFloat), Reduction::kSum, kInfo),
                 ShapeError);
    const at::NoGradGuard no_grad;
    all_reduce(comm, leaf, Reduction::kAvg, kInfo).wait();
    EXPECT_TRUE(at::equal(leaf, at::ones({2, 2})));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TensorCollectives, testing::Values(1, 2, 3, 5),
                         [](const auto& ranks) { return fmt::format("n{}", ranks.param); });

}  // namespace
}  // namespace isoshard
