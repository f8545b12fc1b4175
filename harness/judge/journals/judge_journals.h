// SPDX-License-Identifier: Apache-2.0
/// What the journals of a run's collectives say of each other: over the ranks of a group, and over
/// steps.
#pragma once
#include <string>
#include <vector>

#include "harness/bundle/bundle.h"
#include "harness/trace/reference.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

struct JournalVerdict {
  std::vector<Finding> findings;
  std::vector<std::string> notes;
  std::string summary;  ///< empty where nothing was journaled
};

/// Holds the journals to each other. They can raise an alarm and excuse nothing.
///
/// Findings   a rank whose calls on a group are not those of the group's other ranks (op,
///            reduction, dtype, root, bytes where they must be equal, order); a rank that reduces
///            one parameter's gradient more often than others do; a rank or step without a journal;
///            in a step of the same inputs and gradients as the others, floating-point reductions
///            that differ in number and in bytes from those of most steps (between the steps, and
///            of at most kLoggedBytes, they are free).
/// Notes      sends without a recv; reductions that differ in one of number and bytes, as when DDP
///            cuts its buckets anew; what `allowed` ("scalar/calls.*") excuses.
[[nodiscard]] JournalVerdict judge_journals(const Bundle& judged, const Reference& reference,
                                            const std::vector<std::string>& allowed);

/// Adds to causes that say that ranks hold summands of a gradient that a run's journals show its
/// reduction over these ranks, in the same step: the value `reduced_at`, which is the line that
/// calls, and words. Reductions of buckets have no name: they are of every gradient if they have
/// as many bytes as all gradients of the rank, or a multiple.
void tell_reductions(const Bundle& judged, Verdict& verdict);

/// As many bytes of a step's reductions may be a logged number.
inline constexpr std::int64_t kLoggedBytes = 64;

}  // namespace isoshard
