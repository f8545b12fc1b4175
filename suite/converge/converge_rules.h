// SPDX-License-Identifier: Apache-2.0
/// The rules of the guideline (docs/internals/seeds.md, 5), each by its name.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "suite/converge/test_set.h"

namespace isoshard {

/// kReported: a choice that the guideline leaves open; what was chosen is told.
enum class RuleStatus : std::uint8_t { kPass, kRefused, kReported };
[[nodiscard]] std::string_view name_of(RuleStatus status) noexcept;

struct ConvergeRule {
  std::string name;  ///< "pipeline-batch"
  RuleStatus status = RuleStatus::kPass;
  std::string sentence;  ///< the rule, and what was found
};

/// How the learning rate follows the global batch.
enum class RateScaling : std::uint8_t { kNone, kLinear, kSquareRoot };
/// none, linear, sqrt.   Errors   UsageError with a suggestion and the names.
[[nodiscard]] RateScaling parse_rate_scaling(std::string_view name);
[[nodiscard]] double scaled_rate(double rate, RateScaling scaling, std::int64_t global_batch,
                                 std::int64_t base_global_batch);

/// What the rules look at, besides the test sets.
struct RuleInputs {
  Case control;
  std::vector<std::uint64_t> seeds, test_seeds;  ///< no test_seeds: those of the control
  RateScaling scaling = RateScaling::kNone;
  double base_rate = 0;
  std::int64_t base_global_batch = 0;
};

/// Every rule, in a fixed order. Data are compared by their ids: each step's samples are hashed, in
/// this process, for the control and for every set.
/// Errors   as CaseData.
[[nodiscard]] std::vector<ConvergeRule> check_rules(const RuleInputs& inputs,
                                                    std::span<const TestSet> sets);

/// Errors   UsageError that lists the refused rules, each with its sentence.
void require_rules(std::span<const ConvergeRule> rules);

/// SHA-256 of the token ids and labels of every step of a run; how a step is cut into micro-batches
/// does not count.   Errors   as CaseData.
[[nodiscard]] std::string step_data_sha256(const Case& item);

}  // namespace isoshard
