// SPDX-License-Identifier: Apache-2.0
/// MPI's own order is another one than ours.
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "conformance/comm/call_info.h"
#include "suite/testing/float_values.h"
#include "suite/testing/mpi_test_world.h"

namespace isoshard {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Negative control of the digests: native adds in another order, which floats show.
TEST(MpiNativeOrder, HasOtherBitsThanOurOrdersOfSixteenBitSums) {
  const int size = MpiTestWorld::attached_size();
  if (size < 3) GTEST_SKIP() << "two addends have one order";
  with_float_dtype(Dtype::kBFloat16, [&]<class T>() {
    Values<T> native, ordered;
    for (const ReductionOrder order : {ReductionOrder::kNative, ReductionOrder::kOrdered}) {
      MpiTestWorld world(size, order);
      world.set_deadline(Clock::now() + 60s);
      world.run([&](Communicator& comm) {
        auto data = inputs_of<T>(comm.rank());
        comm.all_reduce(buffer_of<T>(data, 0, data.size()), Reduction::kSum, kInfo).wait();
        (order == ReductionOrder::kNative ? native : ordered) = data;
      });
    }
    EXPECT_NE((first_different_bit_pattern<T>(native, ordered)), -1);
  });
}

// Small integers have one sum in every order.
TEST(MpiNativeOrder, BlocksOfUnevenSizesAreSumsAndMeans) {
  const int size = MpiTestWorld::attached_size();
  std::vector<std::int64_t> counts;
  std::int64_t total = 0;
  for (int rank = 0; rank < size; ++rank) total += counts.emplace_back(2 + rank);
  const float ranks = static_cast<float>(size);
  for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
    MpiTestWorld world(size, ReductionOrder::kNative);
    world.set_deadline(Clock::now() + 60s);
    world.run([&](Communicator& comm) {
      const auto own = static_cast<std::size_t>(comm.rank());
      std::vector<float> values(static_cast<std::size_t>(total), ranks * (comm.rank() + 1.0F));
      std::vector<float> block(static_cast<std::size_t>(counts[own]));
      comm.reduce_scatter_uneven(
              {reinterpret_cast<const std::byte*>(values.data()), total, Dtype::kFloat32},
              {reinterpret_cast<std::byte*>(block.data()), counts[own], Dtype::kFloat32}, counts,
              reduction, kInfo)
          .wait();
      const float sum = ranks * ranks * (ranks + 1) / 2;
      EXPECT_EQ(block,
                std::vector<float>(block.size(), reduction == Reduction::kSum ? sum : sum / ranks));
    });
  }
}

}  // namespace
}  // namespace isoshard
