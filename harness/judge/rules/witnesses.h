// SPDX-License-Identifier: Apache-2.0
/// What shows that a run uses each axis of its mesh.
#pragma once
#include <map>
#include <vector>

#include "harness/trace/record.h"
#include "harness/trace/trace.h"
#include "harness/verdict/parts/held.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// What ranks hold of each tensor. Refers to the run.
[[nodiscard]] std::map<RecordKey, std::vector<Held>> held_by_ranks(const Trace& run);

/// For each axis of degree > 1, in the order of the mesh, the first record whose ranks show it:
///
/// - parts of it at two coordinates of the axis are other ones, and have other contents; or
/// - it is a sum over the axis whose summands are not all equal; or
/// - some coordinate has nothing of it, and has another record that others have not.
///
/// On an axis that splits the batch (dp and its halves) only what is computed from samples counts,
/// if the run recorded any of it: parameters that are sharded there say nothing of the samples.
/// Settings, ids of samples and logged numbers never count, nor what is all zero.
///
/// What a run declares is not believed: copies at places that it says are other ones are no witness
/// if their bytes are equal.
[[nodiscard]] std::vector<AxisWitness> witnesses_of(
    const Trace& run, const std::map<RecordKey, std::vector<Held>>& held);

}  // namespace isoshard::detail
