// SPDX-License-Identifier: Apache-2.0
// Chunks of a sequence.
#include "subjects/parallel/nd/context_split.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace isoshard {

std::vector<Range> ContextSplit::tokens_of(int rank, std::int64_t length) const {
  const bool is_balanced = order_ == ContextOrder::kHeadTail && degree_ > 1;
  const std::int64_t chunks = is_balanced ? 2 * degree_ : degree_;
  if (length % chunks != 0) {
    throw ShapeError(fmt::format("the sequence length must be divisible by {} (cp {}{}), got {}",
                                 chunks, degree_, is_balanced ? ", head and tail" : "", length));
  }
  const std::int64_t size = length / chunks;
  if (!is_balanced) return {{rank * size, size}};
  const Range head{rank * size, size}, tail{(chunks - 1 - rank) * size, size};
  if (head.begin + head.count == tail.begin) return {{head.begin, 2 * size}};
  return {head, tail};
}

at::Tensor ContextSplit::positions_of(int rank, std::int64_t length) const {
  std::vector<at::Tensor> parts;
  for (const Range& range : tokens_of(rank, length))
    parts.push_back(at::arange(range.begin, range.begin + range.count, at::kLong));
  return at::cat(parts);
}

at::Tensor ContextSplit::places_of_gathered(std::int64_t length) const {
  at::Tensor places = at::empty({length}, at::kLong);
  std::int64_t next = 0;
  for (int rank = 0; rank < degree_; ++rank) {
    for (const Range& range : tokens_of(rank, length)) {
      places.narrow(0, range.begin, range.count)
          .copy_(at::arange(next, next + range.count, at::kLong));
      next += range.count;
    }
  }
  return places;
}

at::Tensor ContextSplit::part_of(int rank, const at::Tensor& whole, int dim) const {
  if (degree_ == 1) return whole;
  std::vector<at::Tensor> parts;
  for (const Range& range : tokens_of(rank, whole.size(dim)))
    parts.push_back(whole.narrow(dim, range.begin, range.count));
  return at::cat(parts, dim);
}

Layout ContextSplit::over_tokens(Layout layout, int dim, const MeshShape& mesh, int rank) const {
  if (degree_ == 1) return layout;
  const auto d = static_cast<std::size_t>(dim);
  const std::vector<Box> boxes = boxes_of(layout, mesh, rank);
  const std::int64_t length = layout.global_shape.at(d) * degree_;
  layout.global_shape[d] = length;
  // what shards said is in the boxes now
  std::erase_if(layout.placements, [](const Placement& placement) {
    return placement.kind == Placement::Kind::kShard;
  });
  layout.boxes.clear();
  layout.explicit_parts = true;
  for (const Box& box : boxes) {
    std::int64_t before = 0;  // own tokens before the range
    for (const Range& range : own_tokens(length)) {
      const std::int64_t begin = std::max(box.global_offset[d], before),
                         end = std::min(box.global_offset[d] + box.size[d], before + range.count);
      if (begin < end) {
        Box part = box;
        part.local_offset[d] += begin - box.global_offset[d];
        part.global_offset[d] = range.begin + begin - before;
        part.size[d] = end - begin;
        layout.boxes.push_back(std::move(part));
      }
      before += range.count;
    }
  }
  return layout;
}

}  // namespace isoshard
