// SPDX-License-Identifier: Apache-2.0
/// What shows that a run uses each axis of its mesh.
#pragma once
#include <map>
#include <set>
#include <vector>

#include "harness/trace/record.h"
#include "harness/trace/trace.h"
#include "harness/verdict/parts/held.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// What ranks hold of each tensor. Refers to the run.
[[nodiscard]] std::map<RecordKey, std::vector<Held>> held_by_ranks(const Trace& run);

/// For each axis of degree > 1, in the order of the mesh, the first record that distinguishes two
/// coordinates, and the first pair that no record distinguishes. A record distinguishes two if
///
/// - its parts there lie at different places and differ in content; or
/// - it is a sum over the axis whose summands there are not equal; or
/// - one of them has nothing of it, and has another record that the other one has not (stages,
///   experts).
///
/// On an axis that splits the batch (dp, its halves and cp) only samples and what is computed from
/// them count: parameters that are sharded there say nothing of the samples. If a run recorded
/// nothing of them, no witness is demanded. On other axes samples and losses do not count. Settings
/// and logged numbers never count, nor what is all zero, nor what has a gradient of zeros in its
/// step: the loss does not depend on it.
///
/// What a run declares is not believed: parts at different places are no witness if their bytes are
/// equal. `may_be_unused`   axes of which none is demanded
[[nodiscard]] std::vector<AxisWitness> witnesses_of(
    const Trace& run, const std::map<RecordKey, std::vector<Held>>& held,
    const std::set<Axis>& may_be_unused = {});

}  // namespace isoshard::detail
