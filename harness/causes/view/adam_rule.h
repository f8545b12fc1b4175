// SPDX-License-Identifier: Apache-2.0
/// The rule by which Adam or AdamW makes a step, with its numbers in one step of one parameter. The
/// search for causes and the rule that replays steps share it.
#pragma once
#include <cmath>
#include <vector>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"

namespace isoshard::detail {

struct AdamRule {
  double rate = 0, decay = 0, beta1 = 0, beta2 = 0, eps = 0;
  double updates = 1;        ///< number of updates, this one included
  bool is_decoupled = true;  ///< AdamW; in Adam the decay is in the moments

  /// A moment is divided by this number, which corrects its bias.
  [[nodiscard]] static double correction(double beta, double after) {
    return 1 - std::pow(beta, after);
  }
  [[nodiscard]] double correction1() const { return correction(beta1, updates); }
  [[nodiscard]] double correction2() const { return correction(beta2, updates); }
  /// The decay multiplies a parameter by this number before the step.
  [[nodiscard]] double kept() const { return is_decoupled ? 1 - rate * decay : 1; }
};

/// The rules that the reference's step of a parameter, or of its master, may follow: AdamW first,
/// and Adam if there is a decay. The numbers are the hyperparameters that the reference records of
/// the parameter, or else those of the policy with the recorded rate. Empty: they are not known, or
/// are those of another optimizer.
[[nodiscard]] std::vector<AdamRule> adam_rules_of(const Reference& reference,
                                                  const JudgePolicy& policy, const RecordKey& key);

}  // namespace isoshard::detail
