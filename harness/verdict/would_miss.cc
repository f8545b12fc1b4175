// SPDX-License-Identifier: Apache-2.0
/// The largest errors that pass.
#include "harness/verdict/would_miss.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace isoshard {
namespace {

std::string percent(double error) {
  return fmt::format("{:.2g} %", 100 * error);
}

/// Of one kind of tensors, over all steps.
struct Missed {
  double together = 0;  ///< a factor on all of them
  double worst = 0;     ///< a factor on the one where most passes
  RecordKey worst_key;
  std::int64_t insensitive = 0, zeros = 0;
  bool any = false;
};

Missed missed_of(const Verdict& verdict, RecordKind kind) {
  std::map<RecordKey, double> alone;
  std::map<int, double> together;
  Missed missed;
  for (const TensorComparison& t : verdict.tensors) {
    // its gradient, or the sum, says it
    if (is_gradient_besides(t.key) || role_of(t.key) == NameRole::kSummand) continue;
    if (t.key.kind != kind || t.level == Level::kExact || t.stats.numel == 0) continue;
    if (is_zero(t) || t.subnormal) {
      ++missed.zeros;
      continue;
    }
    if (t.insensitive) {
      ++missed.insensitive;
      continue;
    }
    alone[t.key] = t.scale_sensitivity;
    const auto found = together.find(t.key.step);
    together[t.key.step] = found == together.end() ? t.scale_sensitivity
                                                   : std::min(found->second, t.scale_sensitivity);
  }
  for (const PooledComparison& p : verdict.pools) {
    if (p.first.kind != kind) continue;
    if (p.pool == PoolOf::kTensor) {
      const auto found = alone.find(p.first);
      if (found == alone.end()) continue;
      found->second = std::min(found->second, p.least_found());
    }
    if (p.pool == PoolOf::kRank) continue;
    const auto least = together.find(p.first.step);
    if (least != together.end()) least->second = std::min(least->second, p.least_found());
  }
  for (const auto& [key, error] : alone) {
    if (!missed.any || error > missed.worst) {
      missed.worst = error;
      missed.worst_key = key;
    }
    missed.any = true;
  }
  for (const auto& [step, error] : together) missed.together = std::max(missed.together, error);
  return missed;
}

std::optional<double> missed_of_loss(const Verdict& verdict) {
  std::optional<double> worst;
  for (const TensorComparison& t : verdict.tensors) {
    if (role_of(t.key) != NameRole::kLoss || t.level == Level::kExact) continue;
    double error = t.scale_sensitivity;
    for (const PooledComparison& p : verdict.pools) {
      if (p.first == t.key) error = std::min(error, p.least_found());
    }
    worst = std::max(worst.value_or(0), error);
  }
  return worst;
}

/// Of the gradients; of a run without them, of the forward pass.
Missed missed_of(const Verdict& verdict) {
  const Missed gradients = missed_of(verdict, RecordKind::kGrad);
  return gradients.any ? gradients : missed_of(verdict, RecordKind::kActivation);
}

}  // namespace

std::string weakest_point(const Verdict& verdict) {
  if (verdict.strength != Strength::kWithinTolerance) return "";
  constexpr double kHalf = 0.5;
  if (verdict.judged.of_steps < kHalf)
    return fmt::format("{} of the parameters' elements after the step were judged",
                       percent(verdict.judged.of_steps));
  const Missed missed = missed_of(verdict);
  if (!missed.any) return "";
  return fmt::format("misses scale errors below {} in {}", percent(missed.worst),
                     missed.worst_key.name);
}

std::string would_miss(const Verdict& verdict, const JudgePolicy& options) {
  if (verdict.compared == 0) return "";
  if (options.level == Level::kExact)
    return "nothing in what was compared: a run that differs in one value is rejected";
  if (options.rtol.has_value())
    return fmt::format("scale errors below {} in every tensor, as asked for",
                       percent(*options.rtol));
  const Missed missed = missed_of(verdict);
  if (!missed.any) return "";
  std::string text =
      fmt::format("scale errors below {} in all {}, {} in {}", percent(missed.together),
                  missed.worst_key.kind == RecordKind::kGrad ? "gradients" : "activations",
                  percent(missed.worst), missed.worst_key.name);
  if (const std::optional<double> loss = missed_of_loss(verdict))
    text += fmt::format(", {} in the loss", percent(*loss));
  if (missed.insensitive > 0)
    text += fmt::format(", any in {} that are rounding noise", missed.insensitive);
  if (missed.zeros > 0) text += fmt::format(", any factor in {} that are zero", missed.zeros);
  if (size_of(options.coarsest) == 2 && verdict.pools.empty())
    text += "; runs with moved weights set the limits, as there are no redrawn runs";
  return text;
}

}  // namespace isoshard
