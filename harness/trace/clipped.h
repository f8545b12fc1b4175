// SPDX-License-Identifier: Apache-2.0
/// Gradients besides the final one of a step: after clipping, by the reference's own gradients, and
/// between micro-batches.
#pragma once
#include <optional>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// Of a record "<parameter>.micro_batch", which is what the gradient has been added up to when a
/// micro-batch but the last one ends (call 0 is the first): the key of the final gradient.
[[nodiscard]] std::optional<RecordKey> final_gradient_of(const RecordKey& key);

/// Whether a record is a gradient that the final one of its step says, clipped or not final yet.
/// Shares of gradients and what a verdict would have missed are those of final ones.
[[nodiscard]] bool is_gradient_besides(const RecordKey& key);

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
