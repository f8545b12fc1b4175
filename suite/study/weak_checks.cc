// SPDX-License-Identifier: Apache-2.0
// Whole tensors, put together from all ranks, element by element.
#include "suite/study/weak_checks.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "harness/report/tables.h"
#include "harness/trace/numbers.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

/// A tensor of both runs, without the factors that they declare.
struct Pair {
  std::vector<double> reference, actual;
};

std::vector<double> divided(std::vector<double> numbers, double factor) {
  for (double& number : numbers) number /= factor;
  return numbers;
}

Pair pair_of(const Reference& reference, const Trace& run, const Record& wanted) {
  return {divided(numbers_of(reference.tensor(wanted.key)), wanted.grad_scale),
          divided(numbers_of(run.assemble(wanted.key, wanted.grad_scale)), wanted.grad_scale)};
}

bool is_close(const Pair& pair, const TorchTolerance& tolerance) {
  if (pair.reference.size() != pair.actual.size()) return false;
  for (std::size_t i = 0; i < pair.actual.size(); ++i) {
    const double expected = pair.reference[i], actual = pair.actual[i];
    if (expected == actual) continue;
    if (!(std::fabs(actual - expected) <=
          tolerance.absolute + tolerance.relative * std::fabs(expected)))
      return false;
  }
  return true;
}

bool is_recorded(const Trace& run, const RecordKey& key) {
  return std::ranges::any_of(run.ranks,
                             [&](const RankTrace& rank) { return rank.find(key) != nullptr; });
}

/// Whether some tensor of step 0 that `chooses` picks is not as `accepts` demands.
template <class Chooses, class Accepts>
bool any_wrong(const Reference& reference, const Trace& run, Chooses chooses, Accepts accepts) {
  for (const Record& wanted : reference.trace().ranks.front().records) {
    if (wanted.key.step != 0 || !chooses(wanted) || !is_recorded(run, wanted.key)) continue;
    if (!accepts(pair_of(reference, run, wanted))) return true;
  }
  return false;
}

bool is_activation(const Record& record) {
  return record.key.kind == RecordKind::kActivation && role_of(record.key) != NameRole::kSummand;
}

bool is_gradient(const Record& record) {
  return stage_of(record.key) == Stage::kParameterGrad && !is_gradient_besides(record.key);
}

double published_limit(Dtype dtype) {
  return size_of(dtype) == 2 ? 0.15 : 1e-3;
}

bool first_elements_are_within(const Pair& pair, double limit) {
  const std::size_t count =
      std::min({pair.reference.size(), pair.actual.size(), std::size_t{kListedElements}});
  for (std::size_t i = 0; i < count; ++i)
    if (!(std::fabs(pair.actual[i] - pair.reference[i]) <= limit)) return false;
  return true;
}

bool first_loss_is_near(const Curve& reference, const Curve& curve) {
  constexpr double kLimit = 1e-3;
  return !curve.steps.empty() &&
         std::fabs(curve.steps.front().loss - reference.steps.front().loss) <= kLimit;
}

bool curve_is_near(const Curve& reference, const Curve& curve) {
  constexpr double kShare = 0.01;
  if (curve.steps.size() != reference.steps.size()) return false;
  for (std::size_t i = 0; i < curve.steps.size(); ++i) {
    const double expected = reference.steps[i].loss;
    if (!(std::fabs(curve.steps[i].loss - expected) <= kShare * std::fabs(expected))) return false;
  }
  return true;
}

}  // namespace

std::string_view name_of(WeakCheck check) noexcept {
  constexpr std::array kNames = {"first loss within 0.001", "100-step curve within 1 %",
                                 "forward at torch's tolerances", "gradients at torch's tolerances",
                                 "first 100 elements, published limits"};
  return kNames.at(static_cast<std::size_t>(check));
}

TorchTolerance torch_tolerance(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return {1e-7, 1e-7};
    case Dtype::kBFloat16:
      return {1.6e-2, 1e-5};
    case Dtype::kFloat16:
      return {1e-3, 1e-5};
    default:
      return {1.3e-6, 1e-5};
  }
}

WeakAlarms weak_alarms(const Reference& reference, const Trace& run, const Curve& reference_curve,
                       const Curve& curve, Dtype dtype) {
  const TorchTolerance tolerance = torch_tolerance(dtype);
  const auto is_near = [&](const Pair& pair) { return is_close(pair, tolerance); };
  const auto begins_near = [&](const Pair& pair) {
    return first_elements_are_within(pair, published_limit(dtype));
  };
  const auto is_listed = [](const Record& record) {
    return is_activation(record) && record.key.call == 0 && is_listed_module(record.key.name);
  };
  WeakAlarms alarms{};
  alarms[static_cast<std::size_t>(WeakCheck::kFirstLoss)] =
      !first_loss_is_near(reference_curve, curve);
  alarms[static_cast<std::size_t>(WeakCheck::kCurve)] = !curve_is_near(reference_curve, curve);
  alarms[static_cast<std::size_t>(WeakCheck::kForward)] =
      any_wrong(reference, run, is_activation, is_near);
  alarms[static_cast<std::size_t>(WeakCheck::kGradients)] =
      any_wrong(reference, run, is_gradient, is_near);
  alarms[static_cast<std::size_t>(WeakCheck::kFirstElements)] =
      any_wrong(reference, run, is_listed, begins_near);
  return alarms;
}

}  // namespace isoshard
