// SPDX-License-Identifier: Apache-2.0
/// Records that the reference has under another name: gradients besides the final one of a step
/// (after clipping, by the reference's own gradients, and between micro-batches), and summands.
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

/// Of an activation, or its gradient, "<module>.partial", which is what a rank adds to the output
/// of a module: the key of that output. A run that splits nothing has no summands.
[[nodiscard]] std::optional<RecordKey> sum_of(const RecordKey& key);

/// The bias of a module whose output is `output`, as the step reads it. Its weight and its bias
/// tell whether it has one.
struct BiasOfModule {
  bool is_known = false;         ///< whether the reference says what is added to the sum
  const Record* bias = nullptr;  ///< null: none
};
[[nodiscard]] BiasOfModule bias_of(const Reference& reference, const RecordKey& output);

/// The reference's record that a record of a run is compared with.
struct WantedRecord {
  Record record;  ///< with the grad_scale by which its values are divided
  /// Whose responses count: in units of the reference's tensor, as all that is compared.
  RecordKey response_of;
};

/// Of a run's record `key`: the reference's record of that key; of "<parameter>.clipped", where the
/// reference has none, its gradient, multiplied with the factor that its own norm and the policy's
/// max_grad_norm give; of "<module>.partial" the module's output, to which summands add up with its
/// bias. None if the reference has neither.
[[nodiscard]] std::optional<WantedRecord> wanted_of(const Reference& reference,
                                                    const RecordKey& key,
                                                    const JudgePolicy& policy);

}  // namespace isoshard
