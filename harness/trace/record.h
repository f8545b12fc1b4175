// SPDX-License-Identifier: Apache-2.0
/// What one rank recorded of one tensor.
#pragma once
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/mesh/layout.h"
#include "core/observe/record_name.h"
#include "harness/stats/stats.h"

namespace isoshard {

/// Names a record within a run. Equal on every rank and in the reference. The name is what stands
/// on disk and what keys are ordered by; role_of() and parsed() say what it means.
struct RecordKey {
  int step = 0;
  RecordKind kind = RecordKind::kActivation;
  std::string name;
  int call = 0;  ///< how many times this (step, kind, name) came by before
  auto operator<=>(const RecordKey&) const = default;
};
/// The key's name in parts, which refer to it.
[[nodiscard]] inline RecordName parsed(const RecordKey& key) noexcept {
  return parse_record_name(key.kind, key.name);
}
RecordName parsed(RecordKey&& key) = delete;
[[nodiscard]] inline NameRole role_of(const RecordKey& key) noexcept {
  return parse_record_name(key.kind, key.name).role;
}
/// The record that this one belongs to, in the same step and call: the mask that was drawn again,
/// the gradient before clipping, the output that a summand adds to. A gradient between
/// micro-batches belongs to the final one, whose call is 0. Any other record belongs to itself.
[[nodiscard]] RecordKey base_of(const RecordKey& key);
/// The final gradient of one between micro-batches; any other record itself.
[[nodiscard]] RecordKey final_of(const RecordKey& key);
/// The key of a scalar that has a role.
[[nodiscard]] RecordKey scalar_key(int step, NameRole role);
/// Whether a record repeats another one of the same run and is judged against that one alone:
/// parameters read again, activations made again.
[[nodiscard]] bool is_own_repetition(const RecordKey& key) noexcept;
/// Whether a record is a clipped gradient or one between micro-batches. The final gradient of the
/// step carries the same information, so only final ones count in shares and in "would miss".
[[nodiscard]] bool is_gradient_besides(const RecordKey& key) noexcept;
/// "gradient of model.norm.weight (step 0)", "forward at model.layers.0.mlp (step 0, call 1)".
[[nodiscard]] std::string describe(const RecordKey& key);

/// One part (box or flat range) of a record against the reference.
struct PartStats {
  Box box;  ///< used if the layout has no flat ranges
  FlatRange range;
  Stats stats;               ///< numel 0 when there was no reference to compare with
  std::uint64_t digest = 0;  ///< of the part's packed bytes
  /// Of the elements that a mask leaves out of `stats`: how many had to equal the reference, how
  /// many broke what is demanded of them (harness/trace/masked_steps.h), and the global index of
  /// the first that did; -1: none.
  std::int64_t untouched = 0, broken = 0, first_broken = -1;
};

struct Record {
  RecordKey key;
  std::int64_t order = 0;  ///< position in this rank's execution
  Dtype dtype = Dtype::kFloat32;
  Layout layout;
  double grad_scale = 1.0;
  Shape local_shape;
  std::vector<PartStats> parts;
  /// Elements judged when a mask applied (parameters after an Adam step); -1: no mask.
  std::int64_t unmasked = -1;
  bool kept = false;  ///< bytes of the local tensor are in the rank's arena
  /// Not kept, and the statistics of its parts are those that a rank of another program made
  /// against the reference (docs/reference/bundle.md).
  bool compared = false;
  /// Of the kept bytes in the arena, 64-byte aligned; contiguous, row-major.
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

/// The statistics of all parts of one rank's record.
[[nodiscard]] Stats stats_of(const Record& record);

}  // namespace isoshard
