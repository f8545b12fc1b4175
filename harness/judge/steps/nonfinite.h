// SPDX-License-Identifier: Apache-2.0
/// Gradients that are not finite in a step that both runs skip: where they may be.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "harness/ids/named_values.h"
#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"
#include "harness/verdict/parts/held.h"

namespace isoshard::detail {

/// Holds what is not finite in a run's skipped step to what can overflow there. Which numbers
/// overflow may depend on roundings and on the order of sums, and what is behind one of them in
/// backward may be a NaN. So nothing is asked behind the first gradient of an activation that is
/// not finite. But the first one must have a reason: numbers of the reference that are not finite,
/// or within a factor of 8 of the largest one, in it or in the gradients next to it. A parameter's
/// gradient is made of those of activations, and nothing but its sum over micro-batches is made of
/// it. docs/internals/tolerances.md ("Skipped steps") has the rule.
///
/// One object a run: tensors come in the reference's order.
class NonfiniteGradients {
 public:
  /// Both must outlive the object.
  NonfiniteGradients(const Reference& reference, const JudgePolicy& policy)
      : reference_(&reference), policy_(&policy) {}

  /// Measured values (FindingId::kNotFinite) of a gradient whose non-finite numbers are an error;
  /// empty if they are allowed.
  [[nodiscard]] NamedValues problem_of(const Record& wanted, const std::vector<Held>& held,
                                       const Stats& stats);

 private:
  /// Of a reference's tensor, in units of the run's.
  struct Size {
    std::int64_t near_limit = 0;  ///< numbers that are not finite, or near the largest one
    double largest = 0;           ///< of those that are finite
  };
  [[nodiscard]] Size size_of(const Record& wanted, double factor) const;
  [[nodiscard]] double factor_of(const Record& wanted, const std::vector<Held>& held) const;
  [[nodiscard]] bool is_near_limit_beside(const Record& wanted, double factor) const;
  [[nodiscard]] bool is_module_recorded(int step, const std::string& parameter) const;
  [[nodiscard]] bool is_scale_recorded(int step) const;
  [[nodiscard]] double limit() const;

  const Reference* reference_;
  const JudgePolicy* policy_;
  std::set<int> spread_;  ///< steps in which a gradient of an activation is not finite
  std::set<std::pair<int, std::string>> summed_;  ///< and those of parameters between micro-batches
};

}  // namespace isoshard::detail
