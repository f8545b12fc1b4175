// SPDX-License-Identifier: Apache-2.0
// From placements to shapes, boxes and words.
#include "core/mesh/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/base/error.h"

namespace isoshard {
namespace {

using Kind = Placement::Kind;

[[noreturn]] void refuse(const Layout& layout, std::string_view problem) {
  throw MeshError(fmt::format("layout {} of a tensor [{}]: {}", describe(layout),
                              fmt::join(layout.global_shape, ", "), problem));
}

void require_consistent(const Layout& layout) {
  bool sharded = false;
  for (auto it = layout.placements.begin(); it != layout.placements.end(); ++it) {
    sharded = sharded || it->kind == Kind::kShard;
    if (std::any_of(layout.placements.begin(), it,
                    [&](const Placement& other) { return other.axis == it->axis; })) {
      refuse(layout, fmt::format("duplicate axis {}", name_of(it->axis)));
    }
  }
  if (!layout.explicit_parts && !(layout.boxes.empty() && layout.flat.empty()))
    refuse(layout, "has parts, so explicit_parts must be set");
  if (!layout.boxes.empty() && !layout.flat.empty())
    refuse(layout, "must have either boxes or flat ranges, got both");
  if (layout.explicit_parts && sharded)
    refuse(layout, "must have either explicit parts or a shard placement, got both");
}

bool holds_nothing(const Layout& layout, const MeshShape& mesh, int rank) {
  return std::any_of(layout.placements.begin(), layout.placements.end(),
                     [&](const Placement& placement) {
                       return leaves_out(placement, mesh.coordinate(rank, placement.axis));
                     });
}

/// The box under shard placements. Goes through the mesh's axes from slow to fast, so that the
/// slower of two axes on one dim cuts first, in every order of the placements.
Box shard_box(const Layout& layout, const MeshShape& mesh, int rank) {
  Box box{Shape(layout.global_shape.size(), 0), Shape(layout.global_shape.size(), 0),
          layout.global_shape};
  for (const Placement& placement : layout.placements) {
    if (placement.kind != Kind::kShard) continue;
    if (placement.dim < 0 ||
        static_cast<std::size_t>(placement.dim) >= layout.global_shape.size()) {
      refuse(layout,
             fmt::format("the sharded dim must be from 0 to {}, got {}",
                         static_cast<std::int64_t>(layout.global_shape.size()) - 1, placement.dim));
    }
  }
  for (const AxisDegree& axis : mesh.axes()) {
    const Placement* placement = layout.find(axis.axis);
    if (placement == nullptr || placement->kind != Kind::kShard) continue;
    const auto dim = static_cast<std::size_t>(placement->dim);
    if (box.size[dim] % axis.degree != 0) {
      refuse(layout,
             fmt::format("dim {} of size {}{} must be divisible by {} {}", dim, box.size[dim],
                         box.size[dim] == layout.global_shape[dim] ? "" : " (after a slower axis)",
                         name_of(axis.axis), axis.degree));
    }
    box.size[dim] /= axis.degree;
    box.global_offset[dim] += box.size[dim] * mesh.coordinate(rank, axis.axis);
  }
  return box;
}

}  // namespace

Placement shard(Axis axis, int dim) {
  return {.axis = axis, .kind = Kind::kShard, .dim = dim};
}

Placement partial(Axis axis, Reduction reduction) {
  if (reduction == Reduction::kMin) {
    throw MeshError(
        fmt::format("a partial placement must be sum, avg or max, got {}", name_of(reduction)));
  }
  return {.axis = axis, .kind = Kind::kPartial, .reduction = reduction};
}

Placement only_at(Axis axis, int coordinate) {
  return {.axis = axis, .kind = Kind::kOnlyAt, .coordinate = coordinate};
}

Placement only_at(Axis axis, std::span<const int> coordinates) {
  constexpr int kMost = 63;
  if (coordinates.empty() || coordinates.front() < 0 || coordinates.back() > kMost ||
      std::ranges::adjacent_find(coordinates, std::ranges::greater_equal()) != coordinates.end()) {
    throw MeshError(fmt::format(
        "the coordinates on {} that hold a tensor must be at least one and ascend from 0 to {}, "
        "got [{}]",
        name_of(axis), kMost, fmt::join(coordinates, ", ")));
  }
  Placement placement = only_at(axis, coordinates.front());
  for (const int coordinate : coordinates.subspan(1)) placement.also_at |= 1ULL << coordinate;
  return placement;
}

std::vector<int> coordinates_of(const Placement& placement) {
  std::vector<int> coordinates{placement.coordinate};
  for (int coordinate = 0; coordinate < 64; ++coordinate)
    if ((placement.also_at >> coordinate & 1U) != 0) coordinates.push_back(coordinate);
  return coordinates;
}

bool leaves_out(const Placement& placement, int coordinate) noexcept {
  const bool is_named = coordinate == placement.coordinate ||
                        (coordinate < 64 && (placement.also_at >> coordinate & 1U) != 0);
  return placement.kind == Kind::kOnlyAt && !is_named;
}

const Placement* Layout::find(Axis axis) const noexcept {
  const auto found = std::find_if(placements.begin(), placements.end(),
                                  [axis](const Placement& p) { return p.axis == axis; });
  return found == placements.end() ? nullptr : &*found;
}

Layout replicated(Shape global_shape) {
  Layout layout;
  layout.global_shape = std::move(global_shape);
  return layout;
}

Shape local_shape_of(const Layout& layout, const MeshShape& mesh, int rank) {
  require_consistent(layout);
  if (layout.explicit_parts)
    refuse(layout,
           "explicit parts do not determine the local shape (there may be padding); take it from "
           "the local tensor");
  return shard_box(layout, mesh, rank).size;
}

std::vector<Box> boxes_of(const Layout& layout, const MeshShape& mesh, int rank) {
  require_consistent(layout);
  if (is_flat(layout)) refuse(layout, "flat ranges are not boxes; use flat_parts_of");
  if (holds_nothing(layout, mesh, rank)) return {};
  if (layout.explicit_parts) return layout.boxes;
  return {shard_box(layout, mesh, rank)};
}

std::vector<FlatRange> flat_parts_of(const Layout& layout, const MeshShape& mesh, int rank) {
  require_consistent(layout);
  if (!layout.explicit_parts || !layout.boxes.empty())
    refuse(layout, "has no flat ranges; use boxes_of");
  if (holds_nothing(layout, mesh, rank)) return {};
  return layout.flat;
}

bool is_flat(const Layout& layout) noexcept {
  return layout.explicit_parts && !layout.flat.empty();
}

bool is_maximum(const Layout& layout) noexcept {
  return std::any_of(layout.placements.begin(), layout.placements.end(),
                     [](const Placement& placement) {
                       return placement.kind == Placement::Kind::kPartial &&
                              placement.reduction == Reduction::kMax;
                     });
}

bool is_partial(const Layout& layout) noexcept {
  return std::any_of(layout.placements.begin(), layout.placements.end(),
                     [](const Placement& p) { return p.kind == Kind::kPartial; });
}

std::string describe(const Layout& layout) {
  std::vector<std::string> words;
  for (const Placement& placement : layout.placements) {
    const std::string_view axis = name_of(placement.axis);
    switch (placement.kind) {
      case Kind::kReplicate:
        break;
      case Kind::kShard:
        words.push_back(fmt::format("{}:shard({})", axis, placement.dim));
        break;
      case Kind::kPartial:
        words.push_back(fmt::format("{}:partial({})", axis, name_of(placement.reduction)));
        break;
      case Kind::kOnlyAt:
        words.push_back(
            fmt::format("{}:only_at({})", axis, fmt::join(coordinates_of(placement), ", ")));
        break;
    }
  }
  if (layout.explicit_parts) {
    words.push_back(layout.flat.empty() ? fmt::format("boxes({})", layout.boxes.size())
                                        : fmt::format("flat({})", layout.flat.size()));
  }
  return words.empty() ? "replicated" : fmt::format("{}", fmt::join(words, " "));
}

std::int64_t numel_of(const Shape& shape) noexcept {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

}  // namespace isoshard
