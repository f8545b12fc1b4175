// SPDX-License-Identifier: Apache-2.0
/// How ranks are arranged on named axes, and the communicator of each axis.
#pragma once
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/base/axis.h"
#include "core/comm/communicator.h"

namespace isoshard {

struct AxisDegree {
  Axis axis;
  int degree;
  friend bool operator==(const AxisDegree&, const AxisDegree&) = default;
};

/// Axes from the slowest to the fastest: in {dp 3, tp 2} ranks 0 and 1 are one tp group. Plain
/// geometry, no ranks needed.
class MeshShape {
 public:
  MeshShape() = default;
  /// Errors   MeshError if an axis occurs twice, is kWorld, or a degree is < 1.
  explicit MeshShape(std::vector<AxisDegree> axes);
  [[nodiscard]] std::span<const AxisDegree> axes() const noexcept { return axes_; }
  /// 1 for an axis that is not named.
  [[nodiscard]] int degree(Axis axis) const noexcept;
  [[nodiscard]] int world_size() const noexcept;
  /// 0 for an axis that is not named. Errors   MeshError if rank is outside the world.
  [[nodiscard]] int coordinate(int rank, Axis axis) const;
  /// The world ranks that differ from `rank` at most in their coordinate on `axis`, in the order of
  /// that coordinate.
  [[nodiscard]] std::vector<int> group_of(int rank, Axis axis) const;
  friend bool operator==(const MeshShape&, const MeshShape&) = default;

 private:
  std::vector<AxisDegree> axes_;
};

/// A rank's view of a mesh: its coordinates and one communicator per axis of its shape.
///
/// Ranks    the constructor is collective over `world` (it splits it once per axis).
/// Errors   MeshError if the world's size is not the product of the degrees.
class Mesh {
 public:
  Mesh(MeshShape shape, Communicator& world);
  [[nodiscard]] const MeshShape& shape() const noexcept { return shape_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int degree(Axis axis) const noexcept { return shape_.degree(axis); }
  [[nodiscard]] int coordinate(Axis axis) const { return shape_.coordinate(rank_, axis); }
  [[nodiscard]] Communicator& world() const noexcept { return *world_; }
  /// The group along `axis`. Errors   MeshError if the shape does not name the axis.
  [[nodiscard]] Communicator& group(Axis axis) const;

 private:
  MeshShape shape_;
  Communicator* world_;
  int rank_;
  std::map<Axis, std::unique_ptr<Communicator>> groups_;
};

}  // namespace isoshard
