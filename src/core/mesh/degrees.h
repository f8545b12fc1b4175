// SPDX-License-Identifier: Apache-2.0
/// The degree of each axis, as a user gives them, before anybody has checked them.
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "core/base/axis.h"
#include "core/mesh/mesh.h"

namespace isoshard {

/// The axes of a mesh in the order in which ranks are numbered unless a run says otherwise, from
/// the slowest to the fastest: ranks 0 and 1 are neighbors along tp.
inline constexpr std::array kMeshAxes = {Axis::kPp, Axis::kDp, Axis::kCp, Axis::kEp, Axis::kTp};

/// How many ranks each axis has; 1 for an axis that a run does not use.
///
///     const Degrees degrees{.dp = 2, .tp = 3};
///     const MeshShape mesh = mesh_of(degrees);
struct Degrees {
  int pp = 1, dp = 1, cp = 1, ep = 1, tp = 1;

  /// Requires   an axis of kMeshAxes.
  [[nodiscard]] int& operator[](Axis axis);
  [[nodiscard]] int operator[](Axis axis) const;
  /// The number of ranks; does not overflow for any degrees.
  [[nodiscard]] double num_ranks() const noexcept;
  friend bool operator==(const Degrees&, const Degrees&) = default;
};

/// The mesh of these degrees. It always names dp and tp, and every other axis whose degree is not 1.
/// `order` lists axes from the slowest to the fastest; axes that it does not list keep their usual
/// place before the listed ones.
/// Errors   MeshError if a degree is below 1 or `order` lists an axis twice.
[[nodiscard]] MeshShape mesh_of(const Degrees& degrees, std::span<const Axis> order = {});

}  // namespace isoshard
