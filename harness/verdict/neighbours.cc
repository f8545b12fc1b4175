// SPDX-License-Identifier: Apache-2.0
/// Squares of gradients, and noise in what cancels.
#include "harness/verdict/neighbours.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "harness/stats/tolerance.h"
#include "harness/trace/stage.h"
#include "harness/verdict/sensitivity.h"

namespace isoshard {
namespace {

/// Largest magnitude over norm; 0 if there is none.
double peak_of(const Response& response) {
  return response.reference_norm > 0 ? response.reference_max_abs / response.reference_norm : 0;
}

/// In one step; 0 where the gradient at the output is not recorded, or has other rows.
double error_of_rows_in_step(const Reference& reference, const RecordKey& gradient, double k,
                             Dtype coarsest) {
  const std::size_t dot = gradient.name.rfind('.');
  if (dot == std::string::npos) return 0;
  const RecordKey output{gradient.step, RecordKind::kActivationGrad, gradient.name.substr(0, dot),
                         0};
  const Record* const sum = reference.find(gradient);
  const Record* const rows = reference.find(output);
  const Response* const response = reference.response(output);
  const Response* const of_sum = reference.response(gradient);
  if (sum == nullptr || rows == nullptr || response == nullptr || of_sum == nullptr) return 0;
  const Shape& shape = rows->layout.global_shape;
  if (sum->layout.global_shape.size() != 1 || shape.empty() ||
      shape.back() != sum->layout.global_shape[0] || !(of_sum->reference_norm > 0))
    return 0;
  const double error =
      perturbed_tolerance(*response, k, coarsest, numel_of(shape), response->reference_norm)
          .relative_error;
  return error * response->reference_norm / of_sum->reference_norm;
}

}  // namespace

double error_of_summed_rows(const Reference& reference, const RecordKey& key, double k,
                            Dtype coarsest) {
  if (size_of(coarsest) == 2) return 0;
  const std::string parameter(key.kind == RecordKind::kGrad ? std::string_view(key.name)
                              : state_of(key).empty()       ? std::string_view()
                                                            : parsed(key).base);
  if (!parameter.ends_with(".bias")) return 0;
  double error = 0;
  for (int step = key.kind == RecordKind::kGrad ? key.step : 0; step <= key.step; ++step) {
    const RecordKey gradient{step, RecordKind::kGrad, parameter, 0};
    error = std::max(error, error_of_rows_in_step(reference, gradient, k, coarsest));
  }
  return is_second_moment(key) ? (2 + error) * error : error;
}

double error_of_loss(const Reference& reference, const RecordKey& key, double k, Dtype coarsest) {
  const Record* const begin = reference.begin_of_backward(key.step);
  if (size_of(coarsest) == 2 || role_of(key) != NameRole::kLoss || begin == nullptr) return 0;
  const RecordKey of_logits{key.step, RecordKind::kActivation, begin->key.name, begin->key.call};
  const Response* const gradient = reference.response(begin->key);
  const Response* const logits = reference.response(of_logits);
  if (gradient == nullptr || logits == nullptr) return 0;
  const std::int64_t numel = numel_of(begin->layout.global_shape);
  const double error =
      perturbed_tolerance(*logits, k, coarsest, numel, logits->reference_norm).relative_error *
      logits->reference_norm;
  const double part =
      std::min(1.0, 4 / std::sqrt(static_cast<double>(std::max(numel, std::int64_t{1}))));
  return part * gradient->reference_norm * error +
         2 * unit_roundoff(coarsest) * std::max(1.0, logits->reference_max_abs);
}

std::string_view state_of(const RecordKey& key) noexcept {
  return parsed(key).state;
}

double error_of_squares(const Reference& reference, const RecordKey& key, double k,
                        Dtype coarsest) {
  const Response* moment = reference.response(key);
  if (!is_second_moment(key) || moment == nullptr) return 0;
  const std::string parameter = std::string(parsed(key).base);
  double sum_sq = 0;
  for (int step = 0; step <= key.step; ++step) {
    const RecordKey gradient{step, RecordKind::kGrad, parameter, 0};
    const Record* record = reference.find(gradient);
    const Response* response = reference.response(gradient);
    const double peak = response == nullptr ? 0 : peak_of(*response);
    if (record == nullptr || !(peak > 0)) continue;
    const PerturbedTolerance allowed = perturbed_tolerance(
        *response, k, coarsest, numel_of(record->layout.global_shape), response->reference_norm);
    const double error = allowed.relative_error * (2 + allowed.relative_error) / peak;
    sum_sq += error * error;
  }
  return peak_of(*moment) * std::sqrt(sum_sq);
}

double largest_norm_of_kind(const Reference& reference, const RecordKey& key) {
  double largest = 0;
  for (const auto& [other, response] : reference.responses()) {
    if (!is_exact(stage_of(other)) && !is_gradient_besides(other) && other.step == key.step &&
        other.kind == key.kind && state_of(other) == state_of(key) &&
        std::isfinite(response.reference_norm))
      largest = std::max(largest, response.reference_norm);
  }
  // Sums between micro-batches carry the loss scale, and final gradients do not.
  const Record* const own = reference.find(key);
  const Record* const last =
      role_of(key) == NameRole::kMicroBatch ? reference.find(base_of(key)) : nullptr;
  return own != nullptr && last != nullptr ? largest * own->grad_scale / last->grad_scale : largest;
}

double cancellation_noise(const Reference& reference, const RecordKey& key, double k,
                          Dtype coarsest) {
  const double largest = largest_norm_of_kind(reference, key);
  const Dtype accumulator = coarsest == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
  const double share = responses_allowed(k, coarsest) * unit_roundoff(accumulator);
  return largest * (is_second_moment(key) ? share * share : share);
}

}  // namespace isoshard
