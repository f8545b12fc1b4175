// SPDX-License-Identifier: Apache-2.0
/// A run of several ranks as if one process had done it.
#pragma once
#include "harness/trace/trace.h"

namespace isoshard {

/// The records of all ranks put together (Trace::assemble) in rank 0's order, kept, on a mesh of
/// one: fit for a Reference. What only other ranks have stands where its order puts it. In a
/// pipeline the values of one pass stand in the order of the layers that their names tell
/// (layer_in), gradients the other way round; they stay as they are if a name has no place in it.
///
/// A gradient scale that all ranks declare alike stays declared, and the values stay as they are,
/// bit by bit; where ranks declare different ones, and of partial sums, it is divided out (as judge
/// does with a run's partial sums).
/// Errors   as Trace::assemble.
[[nodiscard]] Trace assembled(const Trace& run);

}  // namespace isoshard
