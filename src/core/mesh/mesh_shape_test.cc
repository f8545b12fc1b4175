// SPDX-License-Identifier: Apache-2.0
// Rank arithmetic, and how a mesh splits its world.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/mesh/mesh.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

const MeshShape kSixRanks({{Axis::kDp, 3}, {Axis::kTp, 2}});

TEST(MeshShape, TheLastAxisIsTheFastest) {
  EXPECT_EQ(kSixRanks.world_size(), 6);
  EXPECT_EQ(kSixRanks.coordinate(5, Axis::kDp), 2);
  EXPECT_EQ(kSixRanks.coordinate(5, Axis::kTp), 1);
  EXPECT_EQ(kSixRanks.coordinate(2, Axis::kDp), 1);
  EXPECT_EQ(kSixRanks.coordinate(2, Axis::kTp), 0);
  EXPECT_THAT(kSixRanks.group_of(1, Axis::kTp), ElementsAre(0, 1));
  EXPECT_THAT(kSixRanks.group_of(1, Axis::kDp), ElementsAre(1, 3, 5));
}

TEST(MeshShape, CoordinatesGiveTheRankBackInThreeAxes) {
  const MeshShape mesh({{Axis::kPp, 2}, {Axis::kDp, 3}, {Axis::kTp, 4}});
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    EXPECT_EQ((mesh.coordinate(rank, Axis::kPp) * 3 + mesh.coordinate(rank, Axis::kDp)) * 4 +
                  mesh.coordinate(rank, Axis::kTp),
              rank);
    for (const AxisDegree& axis : mesh.axes()) {
      EXPECT_EQ(mesh.group_of(
                    rank, axis.axis)[static_cast<std::size_t>(mesh.coordinate(rank, axis.axis))],
                rank);
    }
  }
}

TEST(MeshShape, AnAxisThatIsNotNamedHasDegreeOne) {
  EXPECT_EQ(kSixRanks.degree(Axis::kCp), 1);
  EXPECT_EQ(kSixRanks.coordinate(4, Axis::kCp), 0);
  EXPECT_THAT(kSixRanks.group_of(4, Axis::kCp), ElementsAre(4));
  EXPECT_EQ(MeshShape().world_size(), 1);
}

TEST(MeshShape, RefusesImpossibleAxes) {
  EXPECT_THROW(MeshShape({{Axis::kDp, 2}, {Axis::kDp, 2}}), MeshError);
  EXPECT_THROW(MeshShape({{Axis::kWorld, 2}}), MeshError);
  EXPECT_THROW(MeshShape({{Axis::kDp, 0}}), MeshError);
  EXPECT_THROW(MeshShape({{Axis::kDp, 1 << 20}, {Axis::kTp, 1 << 20}}), MeshError);
  EXPECT_THROW((void)kSixRanks.coordinate(6, Axis::kDp), MeshError);
  EXPECT_THROW((void)kSixRanks.coordinate(-1, Axis::kCp), MeshError);
}

/// Knows its rank and size, and writes down how it is split.
class FakeCommunicator : public Communicator {
 public:
  using Communicator::all_to_all;
  FakeCommunicator(int rank, int size) : rank_(rank), size_(size) {}
  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return ReductionOrder::kOrdered;
  }
  [[nodiscard]] int world_rank_of(int rank) const override { return rank; }
  Work all_reduce(Buffer, Reduction, const CallInfo&) override { return {}; }
  Work all_gather(ConstBuffer, Buffer, const CallInfo&) override { return {}; }
  Work reduce_scatter(ConstBuffer, Buffer, Reduction, const CallInfo&) override { return {}; }
  Work all_gather_uneven(ConstBuffer, Buffer, std::span<const std::int64_t>,
                         const CallInfo&) override {
    return {};
  }
  Work reduce_scatter_uneven(ConstBuffer, Buffer, std::span<const std::int64_t>, Reduction,
                             const CallInfo&) override {
    return {};
  }
  Work all_to_all(ConstBuffer, std::span<const std::int64_t>, Buffer, std::span<const std::int64_t>,
                  const CallInfo&) override {
    return {};
  }
  Work send(ConstBuffer, int, const CallInfo&) override { return {}; }
  Work recv(Buffer, int, const CallInfo&) override { return {}; }
  Work send_recv(std::span<const Transfer>) override { return {}; }
  Work broadcast(Buffer, int, const CallInfo&) override { return {}; }
  void barrier(const CallInfo&) override {}
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    splits.emplace_back(color, key);
    return std::make_unique<FakeCommunicator>(key, 1);
  }
  void abort(std::string_view) noexcept override {}

  std::vector<std::pair<int, int>> splits;

 private:
  int rank_;
  int size_;
};

TEST(Mesh, SplitsOncePerAxisByGroupAndCoordinate) {
  FakeCommunicator world(3, 6);

  const Mesh mesh(kSixRanks, world);

  // dp group {1, 3, 5}, tp group {2, 3}
  EXPECT_THAT(world.splits, ElementsAre(Pair(1, 1), Pair(2, 1)));
  EXPECT_EQ(mesh.rank(), 3);
  EXPECT_EQ(mesh.coordinate(Axis::kDp), 1);
  EXPECT_EQ(mesh.group(Axis::kTp).rank(), 1);
  EXPECT_EQ(&mesh.world(), &world);
}

TEST(Mesh, RefusesAnotherWorldSizeAndAnUnknownAxis) {
  FakeCommunicator small(0, 4);
  FakeCommunicator world(0, 6);
  try {
    const Mesh mesh(kSixRanks, small);
    FAIL() << "no error";
  } catch (const MeshError& error) {
    EXPECT_THAT(error.what(), HasSubstr("dp 3 x tp 2 must have a world of 6 ranks, got 4"));
  }

  EXPECT_THROW((void)Mesh(kSixRanks, world).group(Axis::kPp), MeshError);
  EXPECT_THROW((void)Mesh(kSixRanks, world).group(Axis::kWorld), MeshError);
}

}  // namespace
}  // namespace isoshard
