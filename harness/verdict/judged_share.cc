// SPDX-License-Identifier: Apache-2.0
// Shares by elements, and their limits.
#include "harness/verdict/judged_share.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace isoshard {

JudgedShare judged_share_of(std::span<const TensorComparison> tensors) {
  struct Sum {
    double judged = 0, all = 0;
  };
  JudgedShare share;
  Sum steps;
  std::map<int, Sum> gradients;  // by step; `judged` are those in insensitive tensors
  for (const TensorComparison& t : tensors) {
    if (t.level != Level::kPerturbed) continue;
    const auto elements = static_cast<double>(t.elements);
    if (t.insensitive) ++share.insensitive;
    if (t.key.kind == RecordKind::kGrad) {
      Sum& sum = gradients[t.key.step];
      sum.all += elements;
      if (t.insensitive) sum.judged += elements;
    }
    if (stepped_parameter(t.key).empty()) continue;
    steps.all += elements;
    steps.judged += t.unmasked_share * elements;
    if (t.unmasked_share < share.least) {
      share.least = t.unmasked_share;
      share.least_tensor = describe(t.key);
    }
  }
  if (steps.all > 0) share.of_steps = steps.judged / steps.all;
  for (const auto& [step, sum] : gradients) {
    if (sum.all > 0)
      share.insensitive_gradients = std::max(share.insensitive_gradients, sum.judged / sum.all);
  }
  return share;
}

double least_judged_share(Dtype coarsest) noexcept {
  return size_of(coarsest) > 2 ? 0.1 : 0.01;
}

double most_insensitive_gradients() noexcept {
  return 0.5;
}

std::string too_little_judged(const JudgedShare& judged, Dtype coarsest) {
  const double least = least_judged_share(coarsest), most = most_insensitive_gradients();
  if (!(judged.of_steps >= least)) {
    return fmt::format(
        "{:.2g} % of the elements of parameters after the step were judged, at least {:.2g} % must "
        "be: elsewhere the gradients are below their responses",
        100 * judged.of_steps, 100 * least);
  }
  if (!(judged.insensitive_gradients <= most)) {
    return fmt::format(
        "{:.3g} % of the elements of all gradients are in tensors below twice their own response, "
        "at most {:.3g} % may be",
        100 * judged.insensitive_gradients, 100 * most);
  }
  return "";
}

std::string judged_words(const JudgedShare& judged) {
  if (judged.least_tensor.empty()) return "";
  return fmt::format("{:.3g} % of elements judged, least {:.2g} % in {}", 100 * judged.of_steps,
                     100 * judged.least, judged.least_tensor);
}

}  // namespace isoshard
