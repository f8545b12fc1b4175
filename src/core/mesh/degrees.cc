// SPDX-License-Identifier: Apache-2.0
// From degrees to a mesh.
#include "core/mesh/degrees.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"

namespace isoshard {

int& Degrees::operator[](Axis axis) {
  switch (axis) {
    case Axis::kPp:
      return pp;
    case Axis::kDp:
      return dp;
    case Axis::kCp:
      return cp;
    case Axis::kEp:
      return ep;
    case Axis::kTp:
      return tp;
    case Axis::kDpReplicate:
    case Axis::kDpShard:
    case Axis::kWorld:
      break;
  }
  throw MeshError(fmt::format("axis must be one of a mesh's axes, got {}", name_of(axis)));
}

int Degrees::operator[](Axis axis) const {
  return Degrees(*this)[axis];
}

double Degrees::num_ranks() const noexcept {
  return double{1} * pp * dp * cp * ep * tp;
}

MeshShape mesh_of(const Degrees& degrees, std::span<const Axis> order) {
  std::vector<AxisDegree> axes;
  const auto add = [&](Axis axis) {
    const bool is_always_named = axis == Axis::kDp || axis == Axis::kTp;
    if (is_always_named || degrees[axis] != 1) axes.push_back({axis, degrees[axis]});
  };
  for (const Axis axis : kMeshAxes) {
    if (std::find(order.begin(), order.end(), axis) == order.end()) add(axis);
  }
  for (const Axis axis : order) add(axis);
  return MeshShape(std::move(axes));
}

}  // namespace isoshard
