// SPDX-License-Identifier: Apache-2.0
// Rank arithmetic of named axes, and the split of the world along them.
#include "core/mesh/mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/base/error.h"
#include "core/mesh/mesh_words.h"

namespace isoshard {
namespace {

/// Distance between the world ranks of neighbors on `axis`, and the axis' degree; {1, 1} if it is
/// not named.
struct Stride {
  int stride = 1;
  int degree = 1;
};
Stride stride_of(std::span<const AxisDegree> axes, Axis axis) noexcept {
  int stride = 1;
  for (auto it = axes.rbegin(); it != axes.rend(); ++it) {
    if (it->axis == axis) return {stride, it->degree};
    stride *= it->degree;
  }
  return {};
}

}  // namespace

MeshShape::MeshShape(std::vector<AxisDegree> axes) : axes_(std::move(axes)) {
  std::int64_t world_size = 1;
  for (auto it = axes_.begin(); it != axes_.end(); ++it) {
    if (it->axis == Axis::kWorld)
      throw MeshError(fmt::format("mesh {}: 'world' stands for all ranks and must not be an axis",
                                  words_of(axes_)));
    if (it->degree < 1) {
      throw MeshError(fmt::format("mesh {}: the degree of {} must be at least 1, got {}",
                                  words_of(axes_), name_of(it->axis), it->degree));
    }
    if (std::any_of(axes_.begin(), it,
                    [&](const AxisDegree& other) { return other.axis == it->axis; })) {
      throw MeshError(
          fmt::format("mesh {}: duplicate axis {}", words_of(axes_), name_of(it->axis)));
    }
    world_size *= it->degree;
    if (world_size > std::numeric_limits<int>::max())
      throw MeshError(fmt::format("mesh {}: the number of ranks must be at most {}",
                                  words_of(axes_), std::numeric_limits<int>::max()));
  }
}

int MeshShape::degree(Axis axis) const noexcept {
  return stride_of(axes_, axis).degree;
}

int MeshShape::world_size() const noexcept {
  int product = 1;
  for (const AxisDegree& axis : axes_) product *= axis.degree;
  return product;
}

int MeshShape::coordinate(int rank, Axis axis) const {
  if (rank < 0 || rank >= world_size()) {
    throw MeshError(fmt::format("the rank must be from 0 to {} in the mesh {}, got {}",
                                world_size() - 1, words_of(axes_), rank));
  }
  const auto [stride, degree] = stride_of(axes_, axis);
  return rank / stride % degree;
}

std::vector<int> MeshShape::group_of(int rank, Axis axis) const {
  const auto [stride, degree] = stride_of(axes_, axis);
  const int first = rank - coordinate(rank, axis) * stride;
  std::vector<int> ranks(static_cast<std::size_t>(degree));
  for (int i = 0; i < degree; ++i) ranks[static_cast<std::size_t>(i)] = first + i * stride;
  return ranks;
}

Mesh::Mesh(MeshShape shape, Communicator& world)
    : shape_(std::move(shape)), world_(&world), rank_(world.rank()) {
  if (world.size() != shape_.world_size()) {
    throw MeshError(fmt::format("mesh {} must have a world of {} ranks, got {}",
                                words_of(shape_.axes()), shape_.world_size(), world.size()));
  }
  for (const AxisDegree& axis : shape_.axes()) {
    const int group_id = shape_.group_of(rank_, axis.axis).front();
    groups_[axis.axis] = world.split(group_id, shape_.coordinate(rank_, axis.axis));
  }
}

Communicator& Mesh::group(Axis axis) const {
  const auto found = groups_.find(axis);
  if (found == groups_.end()) {
    throw MeshError(fmt::format("mesh {} has no axis {}{}", words_of(shape_.axes()), name_of(axis),
                                axis == Axis::kWorld ? "; use Mesh::world()" : ""));
  }
  return *found->second;
}

}  // namespace isoshard
