// SPDX-License-Identifier: Apache-2.0
/// Steps whose gradients are not finite: what is still held against a run there, and what is said.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/trace/reference.h"
#include "harness/verdict/tensor_judge.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// Whether a finding says where a tensor's parts lie or which dtypes they have, and nothing of its
/// numbers.
[[nodiscard]] bool is_of_form(const Finding& finding);

/// The ranks whose copies of a part, or of a summand, are not those of most ranks. A NaN equals
/// every NaN that was computed, and copies that equal the reference in value may differ in the
/// signs of zeros. Empty if all copies are equal.
[[nodiscard]] std::optional<Finding> differing_copies(const RecordKey& key, const Trace& run,
                                                      const std::vector<Held>& held);

/// That a gradient is not finite where nothing in the reference comes near the largest number
/// (NonfiniteGradients): on the ranks whose parts are not finite.
[[nodiscard]] Finding far_from_overflow(const RecordKey& key, const std::vector<Held>& held,
                                        NamedValues measured);

/// That nothing of the optimizer was judged, where the reference skipped every step; else empty.
[[nodiscard]] std::string words_of_no_step(const Reference& reference);

/// Whether the reference took a step before this one, in which all gradients were finite.
[[nodiscard]] bool has_whole_step_before(const Reference& reference, int step);

/// Why nothing was compared from this step on: how many gradients are not finite in either run.
///
/// Requires   the run's parts were compared with the reference.
[[nodiscard]] Rule rule_of_parting(const Trace& run, int step);

/// What was not compared in steps that are skipped, in a sentence.
[[nodiscard]] std::string note_on_skipped(std::int64_t compared, std::int64_t excused,
                                          const std::string& first);

}  // namespace isoshard::detail
