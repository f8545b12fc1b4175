// SPDX-License-Identifier: Apache-2.0
// Parts of a mask are what the whole mask has there.
#include "subjects/model/ops/rng_streams.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

MaskPart part_of(Shape global, Shape offset, Shape size) {
  return {"transformer.h.0.attn.resid_dropout",
          2,
          0.25,
          std::move(global),
          std::move(offset),
          std::move(size)};
}

at::Tensor whole_mask(const RngStreams& streams, const Shape& shape) {
  return streams.keep_mask(part_of(shape, Shape(shape.size(), 0), shape));
}

TEST(RngStreams, EveryBoxOfAMaskIsCutOutOfTheWhole) {
  const RngStreams streams(7);
  const Shape global{5, 3, 7, 9};
  const at::Tensor whole = whole_mask(streams, global);

  for (const Shape& offset : {Shape{0, 0, 0, 0}, Shape{2, 0, 0, 0}, Shape{1, 1, 0, 0},
                              Shape{1, 0, 3, 0}, Shape{4, 2, 6, 8}, Shape{0, 1, 2, 3}}) {
    const Shape size{1, 1, 1, 1}, rest{5 - offset[0], 3 - offset[1], 7 - offset[2], 9 - offset[3]};
    for (const Shape& cut :
         {size, rest, Shape{rest[0], 1, rest[2], rest[3]}, Shape{rest[0], rest[1], 1, rest[3]}}) {
      at::Tensor expected = whole;
      for (std::int64_t d = 0; d < 4; ++d) {
        expected = expected.narrow(d, offset[static_cast<std::size_t>(d)],
                                   cut[static_cast<std::size_t>(d)]);
      }
      EXPECT_TRUE(at::equal(streams.keep_mask(part_of(global, offset, cut)), expected));
    }
  }
}

TEST(RngStreams, ASampleKeepsItsMaskInAnyBatch) {
  const RngStreams streams(7);
  const at::Tensor six = whole_mask(streams, {6, 4, 8});

  const at::Tensor last_two = streams.keep_mask(part_of({2, 4, 8}, {4, 0, 0}, {2, 4, 8}));

  EXPECT_TRUE(at::equal(last_two, six.narrow(0, 4, 2)));
}

TEST(RngStreams, SeedStepAndSiteDrawAnew) {
  const Shape shape{4, 32};
  const MaskPart part = part_of(shape, {0, 0}, shape);
  const at::Tensor base = RngStreams(7).keep_mask(part);
  MaskPart next_step = part, other_site = part, again = part;
  next_step.step = 3;
  other_site.site = "transformer.h.1.attn.resid_dropout";
  again.is_recomputed = true;

  EXPECT_FALSE(at::equal(base, RngStreams(8).keep_mask(part)));
  EXPECT_FALSE(at::equal(base, RngStreams(7).keep_mask(next_step)));
  EXPECT_FALSE(at::equal(base, RngStreams(7).keep_mask(other_site)));
  EXPECT_TRUE(at::equal(base, RngStreams(7).keep_mask(again)))
      << "recomputation must see the first mask";
  EXPECT_GT(base.sum().item<std::int64_t>(), 64);
  EXPECT_LT(base.sum().item<std::int64_t>(), 128) << "nothing was dropped";
}

TEST(RngStreams, RefusesPartsOutsideAndRatesThatAreNone) {
  const RngStreams streams(7);
  MaskPart certain = part_of({2, 4}, {0, 0}, {2, 4});
  certain.rate = 1;

  EXPECT_THROW((void)streams.keep_mask(part_of({2, 4}, {0, 2}, {2, 3})), ShapeError);
  EXPECT_THROW((void)streams.keep_mask(part_of({2, 4}, {0}, {2, 4})), ShapeError);
  EXPECT_THROW((void)streams.keep_mask(part_of({2, 4}, {-1, 0}, {1, 4})), ShapeError);
  EXPECT_THROW((void)streams.keep_mask(certain), ShapeError);
}

TEST(RngStreams, AnEmptyPartIsEmpty) {
  EXPECT_EQ(RngStreams(7).keep_mask(part_of({2, 4}, {0, 0}, {0, 4})).numel(), 0);
}

}  // namespace
}  // namespace isoshard
