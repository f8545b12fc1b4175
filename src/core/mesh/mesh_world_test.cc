// SPDX-License-Identifier: Apache-2.0
// A mesh over real ranks (threads): its groups reduce along their axis and nowhere else.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <set>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"
#include "core/mesh/mesh.h"

namespace isoshard {
namespace {

/// The sum over the group of 1 << (world rank): a number that names the group's members.
int members_of(Communicator& group, int rank) {
  std::array<std::int32_t, 1> value{1 << rank};
  group
      .all_reduce({reinterpret_cast<std::byte*>(value.data()), 1, Dtype::kInt32}, Reduction::kSum,
                  {Purpose::kSetup, Axis::kWorld})
      .wait();
  return value[0];
}

TEST(MeshWorld, EachGroupReducesOverItsOwnAxis) {
  const MeshShape shape({{Axis::kDp, 3}, {Axis::kTp, 2}});
  ThreadWorld world(6);
  std::mutex mutex;
  std::set<int> ranks;

  world.run([&](Communicator& comm) {
    const Mesh mesh(shape, comm);
    for (const Axis axis : {Axis::kDp, Axis::kTp}) {
      int expected = 0;
      for (const int member : shape.group_of(comm.rank(), axis)) expected |= 1 << member;
      EXPECT_EQ(mesh.group(axis).size(), shape.degree(axis));
      EXPECT_EQ(mesh.group(axis).rank(), mesh.coordinate(axis));
      EXPECT_EQ(members_of(mesh.group(axis), comm.rank()), expected)
          << "rank " << comm.rank() << " " << name_of(axis);
    }
    const std::lock_guard lock(mutex);
    ranks.insert(mesh.rank());
  });

  EXPECT_EQ(ranks.size(), 6U);
}

TEST(MeshWorld, AnAxisOfDegreeOneIsAGroupOfOne) {
  ThreadWorld world(2);

  world.run([](Communicator& comm) {
    const Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 2}}), comm);
    EXPECT_EQ(mesh.group(Axis::kDp).size(), 1);
    EXPECT_EQ(members_of(mesh.group(Axis::kDp), comm.rank()), 1 << comm.rank());
    EXPECT_EQ(members_of(mesh.group(Axis::kTp), comm.rank()), 3);
  });
}

TEST(MeshWorld, AnotherWorldSizeIsRefusedOnEveryRank) {
  ThreadWorld world(2);

  world.run([](Communicator& comm) {
    EXPECT_THROW(Mesh(MeshShape({{Axis::kTp, 3}}), comm), MeshError);
  });
}

}  // namespace
}  // namespace isoshard
