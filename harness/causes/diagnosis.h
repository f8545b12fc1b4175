// SPDX-License-Identifier: Apache-2.0
/// From a divergent tensor's bytes to a likely cause.
#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "harness/ids/cause.h"
#include "harness/verdict/tensor_judge.h"

namespace isoshard::detail {

/// Places in the table of patterns.
using FittingPatterns = std::set<std::size_t>;

/// A tensor of more elements than this is searched only for what smaller ones have shown.
inline constexpr std::int64_t kLargeTensor = std::int64_t{1} << 24;

/// The likely cause of one tensor's divergence; empty if no pattern fits. A pattern fits when it
/// leaves less than a quarter of the error and no more than a few tolerances. The table of patterns
/// is in diagnosis.cc, their texts in harness/ids/cause.cc.
///
/// `reference_record` may stand for a record that the reference has not (wanted_of): then only a
/// factor is named.
/// `fitting`   of the tensors that were diagnosed before; the pattern that fits is added. Where
///             there is one, others are not tried on a tensor of more than kLargeTensor elements,
///             which would take minutes.
[[nodiscard]] Cause diagnose(const Reference& reference, const Record& reference_record,
                             const Trace& actual, const std::vector<Held>& held,
                             const TensorResult& result, const JudgePolicy& options,
                             FittingPatterns& fitting);

/// The likely cause of a record that the reference has not: state of the optimizer in a step that
/// must be skipped. Empty for any other.
[[nodiscard]] Cause cause_of_unwanted(const Reference& reference, const RecordKey& key);

/// The likely cause of a record that no rank has; empty if nothing is known of it.
[[nodiscard]] Cause cause_of_missing(const Reference& reference, const Trace& actual,
                                     const RecordKey& key);

}  // namespace isoshard::detail
