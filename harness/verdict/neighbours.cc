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

}  // namespace

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
