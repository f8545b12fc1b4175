// SPDX-License-Identifier: Apache-2.0
/// How far the reference moves when nothing but its roundings is drawn anew.
#pragma once
#include <map>
#include <vector>

#include "harness/trace/record.h"

namespace isoshard {

/// Of one record in one redrawn run, against the reference: what pooled statistics add up
/// (harness/verdict/pooled.h). Sums are over elements that are finite on both sides.
struct RedrawnSums {
  int run = 0;             ///< number of the run
  double sum_sq_diff = 0;  ///< of (redrawn - reference)^2
  double dot_diff = 0;     ///< of reference x (redrawn - reference)
  double sum_diff = 0;     ///< of redrawn - reference
  friend bool operator==(const RedrawnSums&, const RedrawnSums&) = default;
};

/// Runs of the reference with its own weights, whose sums are cut at other places and added in
/// other orders (docs/internals/tolerances.md, "Redrawn runs").
struct Redrawn {
  int runs = 0;  ///< 0: there are none
  /// By record, in the order of runs. A run that groups samples otherwise has no activations.
  std::map<RecordKey, std::vector<RedrawnSums>> sums = {};
};

}  // namespace isoshard
