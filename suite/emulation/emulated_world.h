// SPDX-License-Identifier: Apache-2.0
/// Emulated ranks: threads of one process that meet where the numerics say that ranks add.
#pragma once
#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh/mesh.h"
#include "harness/run/side_by_side.h"
#include "subjects/parallel/reduction_point.h"

namespace isoshard {

/// The meeting places of a mesh: groups of ranks along each of its axes.
///
/// A rank that comes to a reduction hands over its tensor and waits; the last one of its group
/// computes the result. So results do not depend on when threads run, and only one tensor per rank
/// is ever held, which ends there if the rank has no other hold of it. At most `num_at_once` ranks
/// compute at the same time; the others wait to begin, to go on behind a reduction, or for one.
/// Errors   a rank that throws releases the others, and run() throws what it threw. Ranks that meet
///          at different points, or with different tensors: ShapeError with both.
class EmulatedWorld {
 public:
  explicit EmulatedWorld(MeshShape mesh, int num_at_once = num_cores());
  /// Runs `body(rank)` for every rank, each in a thread of its own with `num_threads` ATen threads,
  /// and waits for all.
  void run(int num_threads, const std::function<void(int rank)>& body);
  /// What every one of `members` (world ranks, in the order of the group) gets.
  /// Ranks   collective over `members`, which `rank` is one of. `what` names the point and must be
  ///         equal on all.
  [[nodiscard]] at::Tensor reduce(int rank, const std::vector<int>& members, std::string_view what,
                                  at::Tensor part, const ReductionPoint& point);
  /// All members' tensors, flattened and joined in the order of the group. Their sizes may differ.
  [[nodiscard]] at::Tensor gather(int rank, const std::vector<int>& members, std::string_view what,
                                  const at::Tensor& part);
  /// The tensor of `members[giver]`; of the others nothing is asked.
  [[nodiscard]] at::Tensor from_one(int rank, const std::vector<int>& members, std::size_t giver,
                                    std::string_view what, at::Tensor part);
  /// reduce() over the ranks of `rank`'s group along `axis`.
  [[nodiscard]] at::Tensor reduce_over(Axis axis, int rank, std::string_view what, at::Tensor part,
                                       const ReductionPoint& point);
  /// gather() over the ranks of `rank`'s group along `axis`.
  [[nodiscard]] at::Tensor gather_over(Axis axis, int rank, std::string_view what,
                                       const at::Tensor& part);
  [[nodiscard]] const MeshShape& mesh() const noexcept { return mesh_; }
  [[nodiscard]] int degree(Axis axis) const noexcept { return mesh_.degree(axis); }
  [[nodiscard]] int coordinate(int rank, Axis axis) const { return mesh_.coordinate(rank, axis); }

 private:
  struct Group {
    std::vector<at::Tensor> parts;
    std::string what;
    std::size_t arrived = 0, waiting = 0;
    std::uint64_t round = 0;
    at::Tensor result;
  };
  [[nodiscard]] at::Tensor meet(
      int rank, const std::vector<int>& members, std::string_view what, at::Tensor part,
      const std::function<at::Tensor(std::vector<at::Tensor>&)>& result_of);
  void fail(std::exception_ptr error) noexcept;

  MeshShape mesh_;
  std::mutex mutex_;
  int free_cores_;  // a rank that computes has one
  std::condition_variable changed_;
  std::map<std::vector<int>, Group> groups_;  // by members
  bool failed_ = false;
  std::exception_ptr error_;
};

}  // namespace isoshard
