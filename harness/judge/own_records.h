// SPDX-License-Identifier: Apache-2.0
/// What a run's records say of each other, without a reference: repetitions that must be equal, and
/// collectives that must follow their table.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "harness/trace/judge_policy.h"
#include "harness/trace/trace.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

struct OwnRecords {
  std::vector<Finding> findings;
  std::int64_t repetitions = 0;  ///< that were held to what they repeat
  std::string collectives;       ///< Verdict::collectives
};

/// Holds to what they repeat, by their digests: every activation that backward made again, to the
/// first one on that rank; every parameter that forward read in a later step, to the parameter
/// after the step before it, as any rank recorded it. If the policy has a table, each rank's calls
/// are held to it, and calls that nobody recorded are findings. Needs no bytes; findings say more
/// where bytes were kept.
[[nodiscard]] OwnRecords judge_own_records(const Trace& run, const JudgePolicy& policy);

}  // namespace isoshard
