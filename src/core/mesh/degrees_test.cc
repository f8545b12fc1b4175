// SPDX-License-Identifier: Apache-2.0
// What a mesh of given degrees names, and in which order.
#include "core/mesh/degrees.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

std::vector<AxisDegree> axes_of(const MeshShape& mesh) {
  return {mesh.axes().begin(), mesh.axes().end()};
}

TEST(Degrees, AMeshNamesDpAndTpAndWhatElseIsUsedTpFastest) {
  EXPECT_THAT(axes_of(mesh_of({})),
              ElementsAre(AxisDegree{Axis::kDp, 1}, AxisDegree{Axis::kTp, 1}));
  EXPECT_THAT(axes_of(mesh_of({.pp = 2, .dp = 3, .cp = 4, .tp = 5})),
              ElementsAre(AxisDegree{Axis::kPp, 2}, AxisDegree{Axis::kDp, 3},
                          AxisDegree{Axis::kCp, 4}, AxisDegree{Axis::kTp, 5}));
}

TEST(Degrees, AnOrderListsAxesFromTheSlowest) {
  const std::vector<Axis> order = {Axis::kTp, Axis::kDp};
  const MeshShape mesh = mesh_of({.dp = 2, .tp = 3}, order);
  EXPECT_THAT(axes_of(mesh), ElementsAre(AxisDegree{Axis::kTp, 3}, AxisDegree{Axis::kDp, 2}));
  EXPECT_EQ(mesh.coordinate(1, Axis::kDp), 1);
}

TEST(Degrees, AreReadAndSetByAxisAndCountRanksWithoutOverflow) {
  Degrees degrees{.dp = 2};
  degrees[Axis::kCp] = 7;
  EXPECT_EQ(degrees, (Degrees{.dp = 2, .cp = 7}));
  EXPECT_EQ(degrees[Axis::kDp], 2);
  EXPECT_EQ((Degrees{.dp = 2000000000, .tp = 2000000000}.num_ranks()), 4e18);
}

TEST(Degrees, RefusesDegreesBelowOneAndAxesThatAreNone) {
  EXPECT_THROW((void)mesh_of({.dp = 0}), MeshError);
  EXPECT_THROW((void)Degrees{}[Axis::kWorld], MeshError);
}

}  // namespace
}  // namespace isoshard
