// SPDX-License-Identifier: Apache-2.0
// Chunks of dim 0, and blocks by name.
#include "subjects/parallel/fsdp/dim_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/base/error.h"
#include "subjects/parallel/data_parallel.h"

namespace isoshard {

DimShards dim0_shards(const Shape& shape, int dp) {
  if (dp < 1)
    throw UsageError(
        fmt::format("the number of ranks to shard over must be at least 1, got {}", dp));
  if (shape.empty())
    throw ShapeError("a parameter must have at least one dim to be sharded along dim 0");
  const std::int64_t rows = shape.front(),
                     row_size = numel_of(Shape(shape.begin() + 1, shape.end()));
  const std::int64_t chunk = (rows + dp - 1) / dp;
  DimShards shards;
  for (std::int64_t rank = 0; rank < dp; ++rank) {
    const std::int64_t begin = std::min(rows, rank * chunk);
    const Range own{begin, std::min(chunk, rows - begin)};
    shards.rows.push_back(own);
    shards.elements.push_back({own.begin * row_size, own.count * row_size});
  }
  shards.padded = chunk * row_size;
  return shards;
}

Layout layout_in_shards(const Layout& whole, const Shape& shape, const MeshShape& mesh, int rank,
                        const std::vector<Range>& elements) {
  Layout all = replicated(whole.global_shape);
  all.explicit_parts = true;
  for (const Range& run : elements) {
    for (FlatRange range : layout_of_run(whole, shape, mesh, rank, run.begin, run.count).flat) {
      range.local_begin += run.begin;
      all.flat.push_back(range);
    }
  }
  return all;
}

}  // namespace isoshard
