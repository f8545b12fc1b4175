// SPDX-License-Identifier: Apache-2.0
// Where local tensors lie: shards over one and two axes,
// explicit parts, partials and ranks that hold nothing.
#include "core/mesh/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const MeshShape kDp3Tp2({{Axis::kDp, 3}, {Axis::kTp, 2}});

Layout sharded(Shape global_shape, std::vector<Placement> placements) {
  Layout layout = replicated(std::move(global_shape));
  layout.placements = std::move(placements);
  return layout;
}

std::vector<Box> all_boxes(const Layout& layout, const MeshShape& mesh) {
  std::vector<Box> boxes;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    for (Box& box : boxes_of(layout, mesh, rank)) boxes.push_back(std::move(box));
  }
  return boxes;
}

template <class Function>
std::string mesh_error_of(Function&& function) {
  try {
    function();
  } catch (const MeshError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no MeshError";
  return "";
}

TEST(Layout, AReplicatedTensorIsOneBoxOnEveryRank) {
  const Layout layout = replicated({4, 5});

  EXPECT_THAT(local_shape_of(layout, kDp3Tp2, 4), ElementsAre(4, 5));
  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 4), ElementsAre(Box{{0, 0}, {0, 0}, {4, 5}}));
  EXPECT_EQ(tiling_problem({4, 5}, all_boxes(layout, kDp3Tp2)), "");
}

TEST(Layout, OneAxisCutsEqualPartsInTheOrderOfItsCoordinate) {
  const Layout layout = sharded({6, 5}, {shard(Axis::kDp, 0)});

  EXPECT_THAT(local_shape_of(layout, kDp3Tp2, 5), ElementsAre(2, 5));
  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 5), ElementsAre(Box{{0, 0}, {4, 0}, {2, 5}}));
  EXPECT_EQ(tiling_problem({6, 5}, all_boxes(layout, kDp3Tp2)), "");
}

TEST(Layout, TwoAxesCutTwoDims) {
  const Layout layout = sharded({6, 8}, {shard(Axis::kTp, 1), shard(Axis::kDp, 0)});

  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 3), ElementsAre(Box{{0, 0}, {2, 4}, {2, 4}}));
  EXPECT_EQ(tiling_problem({6, 8}, all_boxes(layout, kDp3Tp2)), "");
}

TEST(Layout, OnOneDimTheSlowerAxisIsTheOuterOne) {
  for (const auto& placements : {std::vector{shard(Axis::kTp, 0), shard(Axis::kDp, 0)},
                                 std::vector{shard(Axis::kDp, 0), shard(Axis::kTp, 0)}}) {
    const Layout layout = sharded({12}, placements);
    for (int rank = 0; rank < 6; ++rank)
      EXPECT_THAT(boxes_of(layout, kDp3Tp2, rank), ElementsAre(Box{{0}, {2 * rank}, {2}}));
  }
}

TEST(Layout, AnAxisOutsideTheMeshCutsNothing) {
  const Layout layout = sharded({7}, {shard(Axis::kCp, 0)});

  EXPECT_THAT(local_shape_of(layout, kDp3Tp2, 0), ElementsAre(7));
}

TEST(Layout, ScalarsAndEmptyTensorsHaveLayouts) {
  EXPECT_THAT(boxes_of(replicated({}), kDp3Tp2, 0), ElementsAre(Box{}));
  EXPECT_EQ(tiling_problem({}, all_boxes(replicated({}), kDp3Tp2)), "");
  const Layout empty = sharded({0, 4}, {shard(Axis::kTp, 0)});
  EXPECT_THAT(local_shape_of(empty, kDp3Tp2, 1), ElementsAre(0, 4));
  EXPECT_EQ(tiling_problem({0, 4}, all_boxes(empty, kDp3Tp2)), "");
}

TEST(Layout, OnlyAtLeavesTheOtherRanksOut) {
  const Layout layout = sharded({4}, {only_at(Axis::kDp, 2), shard(Axis::kTp, 0)});

  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 3), IsEmpty());
  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 5), ElementsAre(Box{{0}, {2}, {2}}));
  EXPECT_EQ(tiling_problem({4}, all_boxes(layout, kDp3Tp2)), "");
}

TEST(Layout, OnlyAtMayNameSeveralRanks) {
  const Layout layout =
      sharded({4}, {only_at(Axis::kDp, std::vector<int>{0, 2}), shard(Axis::kTp, 0)});

  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 1), ElementsAre(Box{{0}, {2}, {2}}));
  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 3), IsEmpty());
  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 5), ElementsAre(Box{{0}, {2}, {2}}));
  EXPECT_EQ(describe(layout), "dp:only_at(0, 2) tp:shard(0)");
  EXPECT_THAT(coordinates_of(only_at(Axis::kDp, std::vector<int>{1, 4, 63})),
              ElementsAre(1, 4, 63));
  EXPECT_THAT(mesh_error_of([] {
                (void)only_at(Axis::kDp, std::vector<int>{2, 2});
              }),
              HasSubstr("[2, 2]"));
  EXPECT_THROW((void)only_at(Axis::kDp, std::vector<int>{}), MeshError);
}

TEST(Layout, APartialHoldsTheWholePlaceAndSaysSo) {
  const Layout layout = sharded({4, 6}, {partial(Axis::kTp), shard(Axis::kDp, 1)});

  EXPECT_TRUE(is_partial(layout));
  EXPECT_FALSE(is_partial(replicated({4})));
  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 1), ElementsAre(Box{{0, 0}, {0, 0}, {4, 2}}));
}

TEST(Layout, ExplicitBoxesKeepTheirPaddingOut) {
  // A vocabulary of 5 rows on 2 ranks of 3 local rows: the last row of rank 1 is padding.
  Layout layout = replicated({5, 4});
  layout.explicit_parts = true;
  layout.boxes = {Box{{0, 0}, {3, 0}, {2, 4}}};
  const std::vector<Box> parts{Box{{0, 0}, {0, 0}, {3, 4}}, layout.boxes[0]};

  EXPECT_EQ(boxes_of(layout, kDp3Tp2, 1), layout.boxes);
  EXPECT_EQ(tiling_problem({5, 4}, parts), "");
  EXPECT_THROW((void)local_shape_of(layout, kDp3Tp2, 0), MeshError);
}

TEST(Layout, FlatRangesMayCutRowsAndARankMayHoldNothing) {
  Layout layout = replicated({3, 5});
  layout.explicit_parts = true;
  EXPECT_FALSE(is_flat(layout));
  EXPECT_THAT(boxes_of(layout, kDp3Tp2, 0), IsEmpty());
  EXPECT_THAT(flat_parts_of(layout, kDp3Tp2, 0), IsEmpty());

  layout.flat = {{.local_begin = 2, .global_begin = 7, .count = 8}};

  EXPECT_TRUE(is_flat(layout));
  EXPECT_EQ(flat_parts_of(layout, kDp3Tp2, 0), layout.flat);
  EXPECT_THAT(mesh_error_of([&] { (void)boxes_of(layout, kDp3Tp2, 0); }),
              HasSubstr("flat_parts_of"));
  layout.placements = {only_at(Axis::kTp, 1)};
  EXPECT_THAT(flat_parts_of(layout, kDp3Tp2, 0), IsEmpty());
}

TEST(Layout, DescribesItselfInWords) {
  EXPECT_EQ(describe(replicated({4})), "replicated");
  EXPECT_EQ(describe(sharded({4}, {shard(Axis::kDp, 0), partial(Axis::kTp)})),
            "dp:shard(0) tp:partial(sum)");
  EXPECT_EQ(describe(sharded({4}, {only_at(Axis::kPp, 1), partial(Axis::kDp, Reduction::kAvg)})),
            "pp:only_at(1) dp:partial(avg)");
  Layout flat = replicated({4});
  flat.explicit_parts = true;
  flat.flat.resize(2);
  EXPECT_EQ(describe(flat), "flat(2)");
}

TEST(LayoutErrors, AnIndivisibleDimIsNamedWithTheNumbers) {
  const Layout layout = sharded({7, 4}, {shard(Axis::kDp, 0)});
  const std::string message = mesh_error_of([&] { (void)local_shape_of(layout, kDp3Tp2, 0); });

  EXPECT_THAT(message, HasSubstr("dim 0 of size 7 must be divisible by dp 3"));
  EXPECT_THAT(message, HasSubstr("[7, 4]"));
  EXPECT_THROW((void)boxes_of(sharded({9}, {shard(Axis::kDp, 0), shard(Axis::kTp, 0)}), kDp3Tp2, 0),
               MeshError);
}

TEST(LayoutErrors, ContradictionsAreRefused) {
  EXPECT_THROW((void)local_shape_of(sharded({4}, {shard(Axis::kTp, 1)}), kDp3Tp2, 0), MeshError);
  EXPECT_THROW((void)local_shape_of(sharded({4}, {shard(Axis::kTp, -1)}), kDp3Tp2, 0), MeshError);
  EXPECT_THROW(
      (void)local_shape_of(sharded({4, 4}, {shard(Axis::kTp, 0), shard(Axis::kTp, 1)}), kDp3Tp2, 0),
      MeshError);
  EXPECT_THROW((void)partial(Axis::kTp, Reduction::kMin), MeshError);
  Layout both = sharded({4}, {shard(Axis::kTp, 0)});
  both.explicit_parts = true;
  EXPECT_THROW((void)boxes_of(both, kDp3Tp2, 0), MeshError);
  Layout unflagged = replicated({4});
  unflagged.boxes = {Box{{0}, {0}, {4}}};
  EXPECT_THROW((void)boxes_of(unflagged, kDp3Tp2, 0), MeshError);
  EXPECT_THROW((void)flat_parts_of(replicated({4}), kDp3Tp2, 0), MeshError);
}

}  // namespace
}  // namespace isoshard
