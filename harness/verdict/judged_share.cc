// SPDX-License-Identifier: Apache-2.0
// Shares by elements, and their limits.
#include "harness/verdict/judged_share.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace isoshard {
namespace {

/// Elements of a kind of tensors, and how many of them are judged (of gradients: insensitive).
struct Sum {
  double part = 0, all = 0;
  [[nodiscard]] double share(double of_none) const { return all > 0 ? part / all : of_none; }
};

/// By step.
struct ShareSums {
  std::map<int, Sum> stepped, gradients;
};

ShareSums sums_of(std::span<const TensorComparison> tensors) {
  ShareSums sums;
  for (const TensorComparison& t : tensors) {
    if (t.level != Level::kPerturbed) continue;
    const auto elements = static_cast<double>(t.elements);
    // a clipped gradient is its gradient once more
    if (t.key.kind == RecordKind::kGrad && !is_gradient_besides(t.key)) {
      Sum& sum = sums.gradients[t.key.step];
      sum.all += elements;
      if (t.insensitive) sum.part += elements;
    }
    if (stepped_parameter(t.key).empty()) continue;
    Sum& sum = sums.stepped[t.key.step];
    sum.all += elements;
    sum.part += t.unmasked_share * elements;
  }
  return sums;
}

}  // namespace

JudgedShare judged_share_of(std::span<const TensorComparison> tensors) {
  JudgedShare share;
  for (const TensorComparison& t : tensors) {
    if (t.level != Level::kPerturbed) continue;
    if (t.insensitive && !is_gradient_besides(t.key)) ++share.insensitive;
    if (stepped_parameter(t.key).empty() || t.unmasked_share >= share.least) continue;
    share.least = t.unmasked_share;
    share.least_tensor = describe(t.key);
  }
  const ShareSums sums = sums_of(tensors);
  Sum steps;
  for (const auto& [step, sum] : sums.stepped) {
    steps.part += sum.part;
    steps.all += sum.all;
  }
  share.of_steps = steps.share(1);
  for (const auto& [step, sum] : sums.gradients)
    share.insensitive_gradients = std::max(share.insensitive_gradients, sum.share(0));
  return share;
}

double least_judged_share(Dtype coarsest) noexcept {
  return size_of(coarsest) > 2 ? 0.1 : 0.01;
}

double most_insensitive_gradients() noexcept {
  return 0.5;
}

Rule too_little_judged(std::span<const TensorComparison> tensors, Dtype coarsest) {
  const double least = least_judged_share(coarsest), most = most_insensitive_gradients();
  const ShareSums sums = sums_of(tensors);
  double judged = sums.stepped.empty() ? 1 : 0, insensitive = 0;
  for (const auto& [step, sum] : sums.stepped) judged = std::max(judged, sum.share(1));
  for (const auto& [step, sum] : sums.gradients) insensitive = std::max(insensitive, sum.share(0));
  if (!(judged >= least)) {
    return said(RuleId::kTooFewStepsJudged, {{"judged", 100 * judged}, {"least", 100 * least}});
  }
  if (!(insensitive <= most)) {
    return said(RuleId::kTooManyInsensitive,
                {{"insensitive", 100 * insensitive}, {"most", 100 * most}});
  }
  return {};
}

std::string judged_words(const JudgedShare& judged) {
  if (judged.least_tensor.empty()) return "";
  return fmt::format("{:.3g} % of elements judged, least {:.2g} % in {}", 100 * judged.of_steps,
                     100 * judged.least, judged.least_tensor);
}

}  // namespace isoshard
