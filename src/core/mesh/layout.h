// SPDX-License-Identifier: Apache-2.0
/// Where a recorded local tensor lies in the global one.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/axis.h"
#include "core/comm/communicator.h"
#include "core/mesh/mesh.h"

namespace isoshard {

using Shape = std::vector<std::int64_t>;

/// What one mesh axis does to a tensor. An axis that a layout does not name replicates.
struct Placement {
  enum class Kind : std::uint8_t { kReplicate, kShard, kPartial, kOnlyAt };
  Axis axis = Axis::kDp;
  Kind kind = Kind::kReplicate;
  /// kShard: the tensor dimension that is split into equal parts
  int dim = 0;
  /// kPartial: kSum, kAvg or kMax of the ranks' tensors is the value
  Reduction reduction = Reduction::kSum;
  int coordinate = 0;         ///< kOnlyAt: only the rank at this coordinate holds it
  std::uint64_t also_at = 0;  ///< kOnlyAt: and those at the coordinates of these bits, all larger
  friend bool operator==(const Placement&, const Placement&) = default;
};
[[nodiscard]] Placement shard(Axis axis, int dim);
[[nodiscard]] Placement partial(Axis axis, Reduction reduction = Reduction::kSum);
[[nodiscard]] Placement only_at(Axis axis, int coordinate);
/// Errors   MeshError unless there is a coordinate, and they ascend from 0 to 63.
[[nodiscard]] Placement only_at(Axis axis, std::span<const int> coordinates);
/// Those of kOnlyAt, ascending.
[[nodiscard]] std::vector<int> coordinates_of(const Placement& placement);
/// Whether a placement of kind kOnlyAt leaves the rank at this coordinate of its axis out.
[[nodiscard]] bool leaves_out(const Placement& placement, int coordinate) noexcept;

/// A hyper-rectangle of the local tensor and its place in the global tensor. Elements that no box
/// covers are padding and ignored.
struct Box {
  Shape local_offset;
  Shape global_offset;
  Shape size;
  friend bool operator==(const Box&, const Box&) = default;
};

/// A run of the flattened local tensor and its place in the flattened global tensor. Elements that
/// no run covers are padding.
struct FlatRange {
  std::int64_t local_begin = 0;
  std::int64_t global_begin = 0;
  std::int64_t count = 0;
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

/// The layout of one record on one rank. `placements` are the same on every rank; `boxes` and
/// `flat` are this rank's own.
///
/// Requires   at most one of shard placements, `boxes`, `flat` says where the data lies. partial
///            and only_at combine with any.
struct Layout {
  Shape global_shape;
  std::vector<Placement> placements;
  std::vector<Box> boxes;
  std::vector<FlatRange> flat;
  /// Boxes or flat are used (and may be empty: this rank holds nothing).
  bool explicit_parts = false;

  [[nodiscard]] const Placement* find(Axis axis) const noexcept;
  friend bool operator==(const Layout&, const Layout&) = default;
};

/// Every rank holds the whole tensor.
[[nodiscard]] Layout replicated(Shape global_shape);

/// The shape that the rank's local tensor has under shard placements.
/// Errors   MeshError with the numbers if a sharded dimension is not divisible, or a dim is out of
///          range.
[[nodiscard]] Shape local_shape_of(const Layout& layout, const MeshShape& mesh, int rank);

/// The parts of the global tensor that `rank` holds, in local order, as boxes. Flat ranges are not
/// boxes: see `flat_parts_of`. Empty when an only_at placement leaves this rank out. Shards of one
/// dim over two axes nest: the mesh's slower axis cuts first.
/// Errors   as local_shape_of; MeshError for flat ranges.
[[nodiscard]] std::vector<Box> boxes_of(const Layout& layout, const MeshShape& mesh, int rank);
/// The flat ranges that `rank` holds. Empty when it holds nothing or an only_at placement leaves it
/// out.
/// Errors   MeshError unless the layout has explicit parts and they are flat ranges.
[[nodiscard]] std::vector<FlatRange> flat_parts_of(const Layout& layout, const MeshShape& mesh,
                                                   int rank);
[[nodiscard]] bool is_flat(const Layout& layout) noexcept;
[[nodiscard]] bool is_partial(const Layout& layout) noexcept;
/// Whether the value is the largest of the ranks' values.
[[nodiscard]] bool is_maximum(const Layout& layout) noexcept;

/// Checks that parts tile the global shape: every element covered, and no element by two different
/// parts. Equal boxes count once (they are replicas). Returns an empty string, or the first gap or
/// overlap in words.
/// Errors   MeshError if a part lies outside.
[[nodiscard]] std::string tiling_problem(const Shape& global_shape, const std::vector<Box>& parts);
[[nodiscard]] std::string tiling_problem(const Shape& global_shape,
                                         const std::vector<FlatRange>& parts);

/// dp:shard(0) tp:partial(sum) ...; "replicated" when no axis does anything.
[[nodiscard]] std::string describe(const Layout& layout);

[[nodiscard]] std::int64_t numel_of(const Shape& shape) noexcept;

}  // namespace isoshard
