// SPDX-License-Identifier: Apache-2.0
/// What ranks say of tensors that they compared themselves: held to the reference and to samples.
#pragma once
#include <cstdint>
#include <string>

#include "harness/judge/saved_run.h"
#include "harness/trace/judge_policy.h"

namespace isoshard {

/// How much of a run its ranks compared.
struct ComparedInRanks {
  std::int64_t tensors = 0;   ///< distinct records
  std::int64_t elements = 0;  ///< over all ranks
  std::int64_t sampled = 0;   ///< elements that were kept of them
  std::int64_t let_go = 0;    ///< records that differ by more than allowed, and were not kept
};

/// Holds the statistics that the judged run's ranks made (Record::compared) to what the judge can
/// know of them:
///
/// - they were made against this reference: the manifest says its digest and its responses' hash;
/// - numbers, ids, masks, partial sums, padded tensors, tensors without samples, and what the
///   reference does not have in this shape are never accepted in this form;
/// - what they say of the reference (elements compared, norm, largest element, NaNs, infinities,
///   elements under a mask) is what the reference itself gives;
/// - they do not contradict themselves;
/// - a tensor without any difference has the digest of the reference's;
/// - the samples differ from the reference by no more than the statistics say.
///
/// Errors   FileError that starts with the judged manifest's path, and names record and rank.
[[nodiscard]] ComparedInRanks require_fitting_statistics(const SavedRun& trusted,
                                                         const SavedRun& judged,
                                                         const Reference& reference,
                                                         const JudgePolicy& policy);

/// Of a perturbed run, which has no samples: that it was compared with this reference, whatever its
/// responses were then, and the first three of the above but for samples.
/// Errors   as above.
void require_compared_with(const SavedRun& trusted, const SavedRun& perturbed);

/// Whether any record is of this form.
[[nodiscard]] bool has_statistics(const Trace& trace) noexcept;

/// For the verdict line, and a sentence for its notes; empty if no rank compared.
[[nodiscard]] std::string words_of(const ComparedInRanks& compared);
[[nodiscard]] std::string note_of(const ComparedInRanks& compared);

}  // namespace isoshard
