// SPDX-License-Identifier: Apache-2.0
// Unscaling is exact for powers of two, and an infinity on one rank is one on all.
#include "subjects/train/grad_scaler.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

constexpr LossScaleSettings kDynamic{LossScaleSettings::Kind::kDynamic, 1024, 2, 0.5, 2};

TEST(GradScaling, DividesByTheScaleAndTellsWhatIsNotFinite) {
  ThreadWorld world(1);
  world.run([&](Communicator& comm) {
    const GradScaler scaler(kDynamic, comm);
    const at::Tensor value = at::arange(1, 13, at::kFloat).div(7).view({3, 4});
    const auto unscaled = [&](double bad) {
      NamedTensors gradients{
          {"a", value * 1024}, {"b", at::full({2}, bad, at::kFloat)}, {"none", at::Tensor()}};
      const bool found = scaler.unscale(gradients);
      EXPECT_TRUE(gradients.at("a").equal(value)) << "a power of two rounds nothing";
      return found;
    };

    EXPECT_FALSE(unscaled(1));
    EXPECT_FALSE(unscaled(std::numeric_limits<float>::max()));
    EXPECT_TRUE(unscaled(std::numeric_limits<double>::infinity()));
    EXPECT_TRUE(unscaled(-std::numeric_limits<double>::infinity()));
    EXPECT_TRUE(unscaled(std::numeric_limits<double>::quiet_NaN()));
  });
}

TEST(GradScaling, MultipliesByTheInverseThatFp32Has) {
  ThreadWorld world(1);
  world.run([&](Communicator& comm) {
    const GradScaler scaler({LossScaleSettings::Kind::kStatic, 3}, comm);
    NamedTensors gradients{{"a", at::ones({1}, at::kDouble)}};

    (void)scaler.unscale(gradients);

    EXPECT_EQ(gradients.at("a").item<double>(), static_cast<double>(1.0F / 3.0F))
        << "torch rounds it to fp32";
  });
}

TEST(GradScaling, OneRanksInfinityIsEverybodys) {
  for (const int bad_rank : {-1, 0, 2}) {
    ThreadWorld world(3);
    world.run([&](Communicator& comm) {
      ASSERT_EQ(comm.size(), 3);
      GradScaler scaler(kDynamic, comm);

      const bool found = scaler.found_on_any_rank(comm.rank() == bad_rank);
      scaler.update(found);

      EXPECT_EQ(found, bad_rank >= 0) << "rank " << comm.rank();
      EXPECT_EQ(scaler.scale(), bad_rank >= 0 ? 512 : 1024);
    });
  }
}

}  // namespace
}  // namespace isoshard
