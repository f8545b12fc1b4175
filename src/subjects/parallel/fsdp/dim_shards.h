// SPDX-License-Identifier: Apache-2.0
/// Which rows of a parameter each dp rank keeps, and which parameters are gathered together.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/parallel/range.h"

namespace isoshard {

/// Dim 0 in chunks of ceil(rows / dp): the last ones are shorter or empty.
struct DimShards {
  std::vector<Range> rows;      ///< by dp rank
  std::vector<Range> elements;  ///< the same of the flattened parameter
  /// Elements of the largest shard: what each has in a communication buffer.
  std::int64_t padded = 0;
};

/// Errors   ShapeError for a tensor without dims, UsageError for no rank.
/// Source   torch.chunk, as FSDP2's Shard(0) uses it
///          (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
[[nodiscard]] DimShards dim0_shards(const Shape& shape, int dp);

/// A part of a parameter as it is gathered from its shards: `whole` is the layout of a tensor of
/// `shape` on this rank, of which the result names each shard on its own.
[[nodiscard]] Layout layout_in_shards(const Layout& whole, const Shape& shape,
                                      const MeshShape& mesh, int rank,
                                      const std::vector<Range>& elements);

}  // namespace isoshard
