// SPDX-License-Identifier: Apache-2.0
/// MPI's own order is another one than ours.
#include <gtest/gtest.h>

#include <chrono>

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

}  // namespace
}  // namespace isoshard
