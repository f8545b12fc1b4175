// SPDX-License-Identifier: Apache-2.0
/// Where local tensors lie of which their run does not say it.
#pragma once
#include <filesystem>

#include "harness/bundle/bundle.h"
#include "harness/trace/judge_policy.h"

namespace isoshard {

/// Finds the layout of each record in `judged.inferred` from the local shapes of all ranks and the
/// shape of the reference's tensor: each axis of the mesh either cuts one dimension (two axes cut
/// one evenly, the slower first; one axis may cut unevenly, in rank order) or holds copies. An axis
/// with more ranks than a dimension has equal parts (heads of keys and values) gives neighbours the
/// same part, or ranks take turns. Where several readings fit, the one counts whose values are the
/// reference's to within a tenth of the next one's error (a hundredth of its square), and where
/// several are right in every bit any of them. Clipped gradients, and
/// parameters that forward reads later, are compared with what `policy` and the reference make of
/// them. Another record that the reference does not have is taken as a replica of its own shape.
///
/// A wrong reading can only raise an alarm: values are compared where it puts them.
/// Errors   FileError that starts with `file` if no reading fits, or if two fit alike; both are
/// named.
void infer_layouts(Bundle& judged, const Reference& reference, const JudgePolicy& policy,
                   const std::filesystem::path& file);

}  // namespace isoshard
