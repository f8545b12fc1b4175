// SPDX-License-Identifier: Apache-2.0
/// What a gradient must be after clipping, by the reference's own gradients.
#pragma once
#include <optional>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// The reference's record that a record of a run is compared with.
struct WantedRecord {
  Record record;          ///< with the grad_scale by which its values are divided
  RecordKey response_of;  ///< whose responses count
};

/// Of a run's record `key`: the reference's record of that key; of "<parameter>.clipped", where the
/// reference has none, its gradient, multiplied with the factor that its own norm and the policy's
/// max_grad_norm give. None if the reference has neither.
[[nodiscard]] std::optional<WantedRecord> wanted_of(const Reference& reference,
                                                    const RecordKey& key,
                                                    const JudgePolicy& policy);

/// The response of a record that `wanted` stands for: that of the gradient, times the factor by
/// which it is clipped. None where the reference has no response.
[[nodiscard]] std::optional<Response> response_to(const Reference& reference, const Record& wanted,
                                                  const RecordKey& response_of);

}  // namespace isoshard
