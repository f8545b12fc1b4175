// SPDX-License-Identifier: Apache-2.0
/// What a reader wants to see beside a verdict: who holds what of a tensor, how far each rank is
/// off, the numbers of both sides, and what ranks called. Plain data for reports.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "harness/trace/reference.h"
#include "harness/trace/stage.h"

namespace isoshard {

/// What one rank holds of a tensor, in one piece.
struct HeldPart {
  int rank = 0;
  /// Of the global tensor; of a flat layout one number each, in the flattened tensor.
  std::vector<std::int64_t> begin, size;
  std::int64_t compared = 0, unequal = 0;  ///< elements
  double relative_error = 0, max_abs = 0;
};

/// A tensor and who holds which part of it.
struct HeldTensor {
  RecordKey key;
  Stage stage = Stage::kForward;
  std::vector<std::int64_t> shape = {};  ///< of the whole
  std::string placement = {};            ///< "tp:shard(0)", "replicated": describe(Layout)
  bool is_flat = false;
  std::vector<HeldPart> parts = {};  ///< by rank; a rank that holds nothing has none
  bool is_cut = false;               ///< there are more parts than these
};

/// A corner of a tensor as both sides have it. The tensor is seen as a matrix: its last dimension
/// across, all others down.
struct NumbersBeside {
  RecordKey key;
  std::vector<std::int64_t> shape;
  std::int64_t row = 0, column = 0;  ///< of the first number shown
  bool is_whole = false;             ///< nothing of the tensor is left out
  bool are_summands = false;         ///< what ranks hold are addends of the value
  struct Side {
    int rank = -1;  ///< -1: the reference
    /// Row by row; none where this side does not hold the element.
    std::vector<std::vector<std::optional<double>>> rows;
  };
  std::vector<Side> sides = {};  ///< the reference, then ranks that hold something of it
};

/// The collective calls of one rank on its groups along one axis in step 0, in order; calls in a
/// row that are alike are one entry.
struct RankCalls {
  int rank = 0;
  Axis axis = Axis::kWorld;
  struct Run {
    std::string op, purpose;
    std::int64_t bytes = 0;  ///< of each
    int repeat = 1;
  };
  std::vector<Run> runs = {};
  bool is_cut = false;  ///< there are more than these
};

struct Evidence {
  /// One tensor of each class (a name but for its layer), of the first step.
  std::vector<HeldTensor> placements;
  /// The first divergent tensor and those recorded before and after it, with each rank's error.
  std::vector<HeldTensor> around;
  std::optional<NumbersBeside> numbers;  ///< of the first divergent tensor
  std::vector<RankCalls> calls;
  /// "initial weights", "samples" -> digest of the reference's bits.
  std::map<std::string, std::string> digests;
};

/// `around` are the keys of the first divergent tensor and its neighbors in the order of execution,
/// `first` is the divergent one; both may be empty.
///
/// Guarantees   a few hundred entries, however large the run is.
/// Errors   none for what a run may do wrong: what cannot be shown is left out.
[[nodiscard]] Evidence evidence_of(const Reference& reference, const Trace& actual,
                                   std::span<const RecordKey> around,
                                   const std::optional<RecordKey>& first);

/// Those of step 0.
[[nodiscard]] std::vector<RankCalls> rank_calls_of(const Trace& actual);

}  // namespace isoshard
