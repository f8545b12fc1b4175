// SPDX-License-Identifier: Apache-2.0
/// A run that was recorded before, recorded again.
#pragma once
#include <functional>
#include <optional>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"

namespace isoshard {

class Comparer;

/// What a rank records in the place of one of its records: that tensor, another one of the same
/// dtype and shape, or nothing. A view need live until the next call only.
using ReplayedTensor =
    std::function<std::optional<HostTensor>(const RankTrace& rank, const Record& record)>;

/// As if the run had been recorded against this reference. Kept is what differs.
///
/// Records whose ranks compared them are taken as they are.
///
/// Requires   the trace has kept the tensors of all other records. `comparer`, if not null, makes
///            the statistics.
[[nodiscard]] Trace replayed(const Trace& trace, const Reference& reference,
                             const JudgePolicy& policy, const ReplayedTensor& tensor_of,
                             RunPurpose purpose = RunPurpose::kJudged,
                             Comparer* comparer = nullptr);

}  // namespace isoshard
