// SPDX-License-Identifier: Apache-2.0
/// Faults that are injected into a communicator: a decorator that sees every call and may change,
/// skip or repeat it.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/comm/collective.h"
#include "core/comm/communicator.h"
#include "core/mesh/mesh.h"
#include "harness/fault/probe.h"

namespace isoshard {

/// The undecorated groups of a world, for faults that call another group than the one they were
/// called on.
class UndecoratedMesh {
 public:
  UndecoratedMesh(MeshShape shape, Communicator& world)
      : shape_(std::move(shape)), world_(&world) {}
  [[nodiscard]] Communicator& world() noexcept { return *world_; }
  [[nodiscard]] int coordinate(Axis axis) const { return shape_.coordinate(world_->rank(), axis); }
  /// Ranks   collective over the world at its first use, so the fault of every rank must call it.
  [[nodiscard]] Communicator& group(Axis axis);

 private:
  MeshShape shape_;
  Communicator* world_;
  std::optional<Mesh> mesh_;
};

/// One call on its way to the communicator. `input` and `output` are the same buffer for in-place
/// calls. A send has only an input, a recv only an output, and `root` is their peer.
struct InterceptedCall {
  CollectiveOp op = CollectiveOp::kAllReduce;
  ConstBuffer input;
  Buffer output;
  Reduction reduction = Reduction::kSum;
  int root = 0;
  CallInfo info;
  Communicator* comm = nullptr;                   ///< the undecorated group that was called
  UndecoratedMesh* mesh = nullptr;                ///< the other groups
  std::span<const std::int64_t> input_counts{};   ///< all_to_all, and the blocks of uneven calls
  std::span<const std::int64_t> output_counts{};  ///< all_to_all
  /// kSendRecv, whose `info` is that of the first one
  std::span<const Transfer> transfers{};
  /// A fault sets it to false if it left the call as it was; the call then does not count as fired.
  /// Not nullptr within CollectiveFault::apply.
  bool* acted = nullptr;

  /// Makes the call unchanged.
  Work pass() const;
};

/// A fault of one call. Called for every call of every group but those of Purpose::kSetup.
class CollectiveFault {
 public:
  virtual ~CollectiveFault() = default;
  [[nodiscard]] virtual bool applies(const InterceptedCall& call) const = 0;
  [[nodiscard]] virtual Work apply(const InterceptedCall& call) const = 0;
};

/// Skips the chosen segments: their part of the result is this rank's own input; the rest of the
/// call runs as usual.
///
/// `matches` is asked for each segment of the call, or once with nullptr if the call names none. If
/// every segment matches (or the call names none and matches), nothing is sent at all. A
/// reduce_scatter runs, and its segments, which name parts of the input, keep this rank's own
/// values in its block. Other calls are left alone.
[[nodiscard]] std::shared_ptr<const CollectiveFault> skip_segments(
    std::function<bool(const CallInfo& info, const Segment* segment)> matches);

/// skip_segments of every call of a purpose on an axis.
[[nodiscard]] std::shared_ptr<const CollectiveFault> skip_calls(Purpose purpose, Axis axis);

/// Changes the chosen segments of an all_reduce (or reduce_scatter): what this rank gives to it, or
/// what comes out of it. A change that leaves every bit as it was (a factor of 1, a sum over one
/// rank) does not count as fired.
struct SegmentChange {
  /// RunDetail for each segment of the call, or once with nullptr if the call names none (then the
  /// part is the whole buffer).
  std::function<bool(const CallInfo& info, const Segment* segment)> matches;
  /// May be empty. Changes this rank's input in place.
  std::function<void(const InterceptedCall& call, Buffer part)> before = {};
  /// May be empty. Changes the result in place; `input` is what this rank gave (after `before`).
  std::function<void(const InterceptedCall& call, ConstBuffer input, Buffer result)> after = {};
  /// Also the parts of this rank's block that come out of a reduce_scatter, whose segments name
  /// parts of the input; `after` only.
  bool of_own_blocks = false;
};
[[nodiscard]] std::shared_ptr<const CollectiveFault> change_segments(SegmentChange change);

/// Wraps `inner` and every communicator split from it. `probe` counts the calls that the fault
/// applied to. `shape` is needed by faults that call other groups.
[[nodiscard]] std::unique_ptr<Communicator> decorate_with_fault(
    std::unique_ptr<Communicator> inner, std::shared_ptr<const CollectiveFault> fault,
    FaultProbe probe, MeshShape shape = {});

}  // namespace isoshard
