// SPDX-License-Identifier: Apache-2.0
/// Records that the reference has under another name: gradients after clipping, by the reference's
/// own gradients, and summands.
#pragma once
#include <optional>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"

namespace isoshard {

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

/// Of a run's record `key`: the reference's record of that key; of a clipped gradient, where the
/// reference has none, its gradient, multiplied with the factor that its own norm and the policy's
/// max_grad_norm give; of a summand the module's output, to which summands add up with its bias.
/// None if the reference has neither.
[[nodiscard]] std::optional<WantedRecord> wanted_of(const Reference& reference,
                                                    const RecordKey& key,
                                                    const JudgePolicy& policy);

}  // namespace isoshard
