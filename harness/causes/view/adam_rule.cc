// SPDX-License-Identifier: Apache-2.0
#include "harness/causes/view/adam_rule.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "core/observe/hyperparameters.h"
#include "harness/causes/view/values.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/run_view.h"
#include "harness/trace/stage.h"

namespace isoshard::detail {
namespace {

double updates_until(const Reference& reference, const RecordKey& key) {
  const RecordKey own{key.step, RecordKind::kOptimizer,
                      to_string({stepped_parameter(key), NameRole::kState, "step"}), 0};
  for (const RecordKey& count : {own, scalar_key(key.step, NameRole::kOptimizerSteps)}) {
    if (reference.find(count) == nullptr) continue;
    const Values values(reference.tensor(count));
    if (values.numel() > 0) return values.max();
  }
  return key.step + 1;
}

/// The numbers by name, where the reference records those of the parameter.
std::optional<AdamRule> recorded_rule(const Reference& reference, const RecordKey& key) {
  const RecordKey numbers{key.step, RecordKind::kOptimizer,
                          to_string({stepped_parameter(key), NameRole::kHyperparameters, {}}), 0};
  const Record* const record = reference.find(numbers);
  if (record == nullptr || record->layout.global_shape != Shape{std::ssize(kHyperparameters)})
    return std::nullopt;
  const Values values(reference.tensor(numbers));
  const auto number = [&](std::string_view name) {
    const auto at = std::ranges::find(kHyperparameters, name) - kHyperparameters.begin();
    return values.flat()[static_cast<std::size_t>(at)];
  };
  return AdamRule{.rate = number("lr"),
                  .decay = number("weight_decay"),
                  .beta1 = number("beta1"),
                  .beta2 = number("beta2"),
                  .eps = number("eps")};
}

}  // namespace

std::vector<AdamRule> adam_rules_of(const Reference& reference, const JudgePolicy& policy,
                                    const RecordKey& key) {
  if (stepped_parameter(key).empty()) return {};
  std::optional<AdamRule> rule = recorded_rule(reference, key);
  if (!rule.has_value() && policy.step_rule.has_value()) {
    const StepRule& given = *policy.step_rule;
    rule = {
        .rate = RunView(reference)
                    .first_element(key.step, NameRole::kLearningRate)
                    .value_or(given.learning_rate),
        .decay = given.weight_decay,
        .beta1 = given.beta1,
        .beta2 = given.beta2,
        .eps = given.eps,
    };
  }
  if (!rule.has_value()) return {};
  rule->updates = updates_until(reference, key);
  const bool is_adam = rule->rate > 0 && rule->beta1 >= 0 && rule->beta1 < 1 && rule->beta2 > 0 &&
                       rule->beta2 < 1 && rule->updates >= 1;
  if (!is_adam) return {};
  std::vector<AdamRule> rules = {*rule};
  if (rule->decay != 0) {
    rules.push_back(*rule);
    rules.back().is_decoupled = false;
  }
  return rules;
}

}  // namespace isoshard::detail
