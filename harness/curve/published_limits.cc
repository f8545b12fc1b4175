// SPDX-License-Identifier: Apache-2.0
// Three numbers of two curves beside what was published.
#include "harness/curve/published_limits.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace isoshard {
namespace {

bool is_sum_over_tokens(const Curve& curve) {
  const nlohmann::json settings = nlohmann::json::parse(curve.settings);
  return settings.is_object() && settings.value("loss_mean", "") == "sum";
}

}  // namespace

std::vector<CurveLimit> published_limits(const Curve& reference, const Curve& actual,
                                         std::span<const SubjectCurveLimits> limits) {
  const auto own = std::ranges::find(limits, actual.subject, &SubjectCurveLimits::subject);
  const std::size_t steps = std::min(reference.steps.size(), actual.steps.size());
  if (own == limits.end() || steps == 0 || actual.steps.front().step != 0 ||
      reference.steps.front().step != 0 || is_sum_over_tokens(actual))
    return {};
  double largest = 0, sum = 0, first = 0;
  for (std::size_t i = 0; i < steps; ++i) {
    const double apart = std::fabs(actual.steps[i].loss - reference.steps[i].loss);
    if (i == 0) first = apart;
    if (!std::isnan(largest) && !(apart <= largest)) largest = apart;  // a NaN stays
    sum += apart;
  }
  const auto limit = [](std::string what, double most, double measured) {
    return CurveLimit{std::move(what), most, measured, measured < most};
  };
  return {limit("initial loss", kInitialLossLimit, first),
          limit("largest difference", own->largest, largest),
          limit("mean difference", own->mean, sum / static_cast<double>(steps))};
}

bool are_held(const Curve& actual) noexcept {
  return std::ranges::all_of(actual.steps, [](const CurveStep& step) {
    return step.learning_rate <= kPublishedLearningRate;
  });
}

std::string limits_in_words(std::span<const CurveLimit> limits, bool held) {
  std::vector<std::string> words;
  bool all_hold = true;
  for (const CurveLimit& limit : limits) {
    words.push_back(fmt::format("{} {:.3g} (below {:g}{})", limit.what, limit.measured, limit.limit,
                                limit.holds ? "" : ": BROKEN"));
    all_hold = all_hold && limit.holds;
  }
  return fmt::format("published limits: {}{}", fmt::join(words, ", "),
                     all_hold || held ? ""
                                      : fmt::format("; not held above a learning rate of {:g}",
                                                    kPublishedLearningRate));
}

}  // namespace isoshard
