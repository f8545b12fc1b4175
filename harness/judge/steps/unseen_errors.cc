// SPDX-License-Identifier: Apache-2.0
// Parameters and masters of one step together.
#include "harness/judge/steps/unseen_errors.h"

#include <fmt/format.h>

#include <set>
#include <string_view>

#include "harness/trace/stage.h"

namespace isoshard::detail {

void UnseenErrors::add(const RecordKey& key, bool hides_step, bool is_sum) {
  if (is_sum) ++sums_;
  const std::string_view parameter = stepped_parameter(key);
  if (parameter.empty()) return;
  bool& is_seen = is_seen_[{key.step, std::string(parameter)}];
  is_seen = is_seen || !hides_step;
}

std::string UnseenErrors::words(const JudgedShare& judged) const {
  std::set<std::string_view> all, unseen;
  std::string_view first;
  for (const auto& [step, is_seen] : is_seen_) {
    all.insert(step.second);
    if (is_seen) continue;
    if (unseen.empty()) first = step.second;
    unseen.insert(step.second);
  }
  std::string text;
  if (!unseen.empty())
    text = fmt::format(
        "a step left out in {} of {} parameters, first {}, where roundings are as "
        "large as steps",
        unseen.size(), all.size(), first);
  if (judged.of_steps < 1) {
    if (!text.empty()) text += ", and ";
    text += fmt::format(
        "any step within the optimizer's rule in {:.3g} % of the elements, whose "
        "gradients are below their responses",
        100 * (1 - judged.of_steps));
  }
  if (sums_ > 0) {
    if (!text.empty()) text += ", and ";
    text += fmt::format("errors of summands that cancel in {} sum{} over ranks", sums_,
                        sums_ == 1 ? "" : "s");
  }
  return text;
}

}  // namespace isoshard::detail
