// SPDX-License-Identifier: Apache-2.0
// Numbers near the largest one, and what is behind them.
#include "harness/judge/steps/nonfinite.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "harness/stats/stats.h"
#include "harness/trace/numbers.h"
#include "harness/trace/run_view.h"
#include "harness/trace/stage.h"

namespace isoshard::detail {
namespace {

/// Sums over ranks may have pieces that are larger than the sum, and products that nobody records
/// lie between two gradients.
constexpr double kNear = 8;

}  // namespace

double NonfiniteGradients::limit() const {
  return policy_->coarsest == Dtype::kFloat16 ? 65504 : std::numeric_limits<float>::max();
}

/// What the run computes is so many times what the reference's record holds.
double NonfiniteGradients::factor_of(const Record& wanted, const std::vector<Held>& held) const {
  double factor = 0;
  for (const Held& h : held)
    factor = std::max(factor, std::fabs(h.record->grad_scale / wanted.grad_scale));
  if (wanted.key.kind != RecordKind::kGrad) return factor;
  // ranks add up before they divide by their number
  factor *= policy_->activation_grad_scale.value_or(1);
  const bool is_unscaled = role_of(wanted.key) != NameRole::kMicroBatch;
  if (is_unscaled) factor *= RunView(*reference_).loss_scale(wanted.key.step).value_or(1);
  return factor;
}

NonfiniteGradients::Size NonfiniteGradients::size_of(const Record& wanted, double factor) const {
  Size size;
  const HostTensor tensor = reference_->tensor(wanted.key);  // numbers of logits would be gigabytes
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const double magnitude = std::fabs(value_at(tensor.bytes.data(), tensor.dtype, i)) * factor;
    if (!(magnitude < limit() / kNear)) ++size.near_limit;
    if (std::isfinite(magnitude)) size.largest = std::max(size.largest, magnitude);
  }
  return size;
}

/// In the gradients of activations that backward makes directly before and behind it.
bool NonfiniteGradients::is_near_limit_beside(const Record& wanted, double factor) const {
  constexpr std::ptrdiff_t kBeside = 3;
  std::vector<const Record*> gradients;
  std::ptrdiff_t own = -1;
  for (const Record& record : reference_->trace().ranks.at(0).records) {
    if (record.key.step != wanted.key.step || record.key.kind != RecordKind::kActivationGrad)
      continue;
    if (record.key == wanted.key) own = std::ssize(gradients);
    gradients.push_back(&record);
  }
  if (own < 0) return true;
  const auto end = std::min(std::ssize(gradients), own + kBeside + 1);
  for (auto i = std::max<std::ptrdiff_t>(0, own - kBeside); i < end; ++i) {
    if (i != own && size_of(*gradients[static_cast<std::size_t>(i)], factor).near_limit > 0)
      return true;
  }
  return false;
}

/// Whether the reference has a gradient of an activation of the module that the parameter is of.
bool NonfiniteGradients::is_module_recorded(int step, const std::string& parameter) const {
  const std::string module = parameter.substr(0, parameter.rfind('.'));
  return std::ranges::any_of(reference_->trace().ranks.at(0).records, [&](const Record& record) {
    return record.key.step == step && record.key.kind == RecordKind::kActivationGrad &&
           record.key.name == module;
  });
}

/// Without it nobody knows in which units a step with an overflow was computed.
bool NonfiniteGradients::is_scale_recorded(int step) const {
  const RunView run(*reference_);
  return run.scalar(step, NameRole::kLossScale) != nullptr ||
         run.scalar(step, NameRole::kFoundInf) == nullptr;
}

NamedValues NonfiniteGradients::problem_of(const Record& wanted, const std::vector<Held>& held,
                                           const Stats& stats) {
  const RecordKey& key = wanted.key;
  const std::int64_t bad = stats.nan_actual + stats.inf_actual;
  const bool is_of_activation = key.kind == RecordKind::kActivationGrad;
  if (bad == 0 || spread_.contains(key.step) || !reference_->has_bytes() ||
      (!is_of_activation && key.kind != RecordKind::kGrad))
    return {};
  const bool is_first = is_of_activation && spread_.insert(key.step).second;
  const bool is_final = role_of(key) != NameRole::kMicroBatch;
  const std::string parameter = final_of(key).name;
  if (!is_of_activation && is_final && summed_.contains({key.step, parameter})) return {};
  if (!is_final) summed_.insert({key.step, parameter});
  if (reference_->find(key) == nullptr) return {};  // such as a gradient after clipping
  // Of a module whose gradients nobody recorded, nothing says that they are finite.
  if (!is_of_activation && !is_module_recorded(key.step, parameter)) return {};
  if (!is_of_activation && is_final && !is_scale_recorded(key.step)) return {};
  const double factor = factor_of(wanted, held);
  const Size size = size_of(wanted, factor);
  // pieces of a sum may overflow where the sum is small, but not more often than where it is not
  const std::int64_t most = size.near_limit == 0 ? 0 : 2 * size.near_limit + 4;
  const bool may_be =
      is_first ? size.near_limit > 0 || is_near_limit_beside(wanted, factor) : bad <= most;
  if (may_be) return {};
  return {{"not_finite", bad},
          {"elements", stats.numel},
          {"nan_actual", stats.nan_actual},
          {"not_finite_in_reference", stats.nan_reference + stats.inf_reference},
          {"largest", size.largest},
          {"limit", limit()}};
}

}  // namespace isoshard::detail
