// SPDX-License-Identifier: Apache-2.0
/// What a gradient must be after clipping, by the reference's own gradients.
#pragma once
#include <optional>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// The reference's record that a record of a run is compared with.
struct WantedRecord {
  Record record;  ///< with the grad_scale by which its values are divided
  /// Whose responses count: in units of the reference's tensor, as all that is compared.
  RecordKey response_of;
};

/// Of a run's record `key`: the reference's record of that key; of "<parameter>.clipped", where the
/// reference has none, its gradient, multiplied with the factor that its own norm and the policy's
/// max_grad_norm give. None if the reference has neither.
[[nodiscard]] std::optional<WantedRecord> wanted_of(const Reference& reference,
                                                    const RecordKey& key,
                                                    const JudgePolicy& policy);

}  // namespace isoshard
