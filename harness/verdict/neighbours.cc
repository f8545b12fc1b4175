// SPDX-License-Identifier: Apache-2.0
/// Squares of gradients, and noise in what cancels.
#include "harness/verdict/neighbours.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "harness/stats/stats.h"
#include "harness/stats/tolerance.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/stage.h"
#include "harness/verdict/sensitivity.h"

namespace isoshard {
namespace {

/// Largest magnitude over norm; 0 if there is none.
double peak_of(const Response& response) {
  return response.reference_norm > 0 ? response.reference_max_abs / response.reference_norm : 0;
}

/// How many elements of equal size would make up the reference's norm.
double elements_of_norm(const Response& response) {
  const double peak = peak_of(response);
  return peak > 0 ? 1 / (peak * peak) : std::numeric_limits<double>::infinity();
}

/// The relative error that a record's own responses allow; 0 if it has none.
double own_error(const Reference& reference, const RecordKey& key, double k, Dtype coarsest) {
  const Record* const record = reference.find(key);
  const Response* const response = reference.response(key);
  if (record == nullptr || response == nullptr) return 0;
  return perturbed_tolerance(*response, k, coarsest, numel_of(record->layout.global_shape),
                             response->reference_norm)
      .relative_error;
}

/// The relative error that its own responses, and the tensors of its step that feed it, allow.
double allowed_error(const Reference& reference, const RecordKey& key, double k, Dtype coarsest) {
  const double fed = std::max(error_of_few_elements(reference, key, k, coarsest),
                              error_of_summed_rows(reference, key, k, coarsest));
  return std::max(own_error(reference, key, k, coarsest),
                  std::min(fed, scale_ceiling(key, coarsest)));
}

/// The output whose gradient is `gradient`.
RecordKey output_of(const Record& gradient) {
  RecordKey key = gradient.key;
  key.kind = RecordKind::kActivation;
  return key;
}

/// For a state that is linear in gradients.
double error_of_state(const Reference& reference, const RecordKey& key, double k, Dtype coarsest) {
  const Response* const state = reference.response(key);
  if (state_of(key).empty() || state == nullptr || !(state->reference_norm > 0)) return 0;
  const std::string parameter(parsed(key).base);
  double error = 0;
  for (int step = 0; step <= key.step; ++step) {
    const RecordKey gradient{step, RecordKind::kGrad, parameter, 0};
    const Response* const response = reference.response(gradient);
    if (response == nullptr) continue;
    const double share = std::min(1.0, response->reference_norm / state->reference_norm);
    error = std::max(error, share * allowed_error(reference, gradient, k, coarsest));
  }
  return is_second_moment(key) ? (2 + error) * error : error;
}

/// For a parameter after a step: as far as the step makes it up, the relative error of what it is
/// stepped with.
double error_of_step(const Reference& reference, const RecordKey& key, double k, Dtype coarsest) {
  const std::string parameter(stepped_parameter(key));
  const Record* const after = parameter.empty() ? nullptr : reference.find(key);
  const Record* const before = after == nullptr ? nullptr : reference.find(before_step(key));
  if (before == nullptr || !reference.has_bytes()) return 0;
  Stats step;
  accumulate(step, reference.bytes(*before), before->dtype, reference.bytes(*after), after->dtype,
             numel_of(after->layout.global_shape), 0);
  if (!(step.sum_sq_actual > 0)) return 0;
  const RecordKey momentum{key.step, RecordKind::kOptimizer,
                           to_string({parameter, NameRole::kState, "momentum_buffer"}), 0};
  const RecordKey gradient{key.step, RecordKind::kGrad, parameter, 0};
  const double error = reference.response(momentum) != nullptr
                           ? std::max(own_error(reference, momentum, k, coarsest),
                                      error_of_state(reference, momentum, k, coarsest))
                           : allowed_error(reference, gradient, k, coarsest);
  return std::min(1.0, std::sqrt(step.sum_sq_diff / step.sum_sq_actual)) * error;
}

}  // namespace

double error_of_neighbours(const Reference& reference, const RecordKey& key, double k,
                           Dtype coarsest) {
  double error = error_of_few_elements(reference, key, k, coarsest);
  if (size_of(coarsest) > 2) {
    error = std::max({error, error_of_summed_rows(reference, key, k, coarsest),
                      error_of_state(reference, key, k, coarsest),
                      error_of_step(reference, key, k, coarsest)});
  }
  return std::min(error, scale_ceiling(key, coarsest));
}

double error_of_few_elements(const Reference& reference, const RecordKey& key, double k,
                             Dtype coarsest) {
  constexpr double kFew = 15;            // few_elements_factor is 1 from there on
  constexpr double kLargestLogit = 128;  // outputs beyond are no logits of a softmax
  const Response* const response = reference.response(key);
  if (key.kind == RecordKind::kScalar || response == nullptr) return 0;
  const bool is_gradient = key.kind == RecordKind::kGrad || key.kind == RecordKind::kActivationGrad;
  // An activation that a few large elements rule is still judged as a whole.
  const Record* const record = reference.find(key);
  const bool is_small = record != nullptr && numel_of(record->layout.global_shape) < kFew;
  if (!is_gradient && state_of(key).empty() && !is_small) return 0;
  // In 16 bits squares have the bound of their gradients, which is wide already.
  if (size_of(coarsest) == 2 && (!is_small || is_second_moment(key))) return 0;
  double elements = elements_of_norm(*response), of_logits = 0;
  const Record* const begin = reference.begin_of_backward(key.step);
  const Response* const first = begin == nullptr ? nullptr : reference.response(begin->key);
  // 16-bit floats are computed in fp32: there the roundings of a softmax are below the result's.
  if (size_of(coarsest) > 2 && is_gradient && first != nullptr && elements_of_norm(*first) < kFew) {
    elements = std::min(elements, elements_of_norm(*first));
    const Response* const logits = reference.response(output_of(*begin));
    if (logits != nullptr && logits->reference_max_abs <= kLargestLogit)
      of_logits = own_error(reference, output_of(*begin), k, coarsest) * logits->reference_norm;
  }
  const double few = k * few_elements_factor(std::llround(std::clamp(elements, 1.0, kFew)));
  return std::max(responses_allowed(few, coarsest) * response->relative_error, of_logits);
}

double error_of_summed_rows(const Reference& reference, const RecordKey& key, double k,
                            Dtype coarsest) {
  if (size_of(coarsest) == 2 || key.kind != RecordKind::kGrad || !key.name.ends_with(".bias"))
    return 0;
  const RecordKey output{key.step, RecordKind::kActivationGrad,
                         key.name.substr(0, key.name.rfind('.')), 0};
  const Record* const sum = reference.find(key);
  const Record* const rows = reference.find(output);
  const Response* const response = reference.response(output);
  const Response* const of_sum = reference.response(key);
  if (sum == nullptr || rows == nullptr || response == nullptr || of_sum == nullptr) return 0;
  const Shape& shape = rows->layout.global_shape;
  if (sum->layout.global_shape.size() != 1 || shape.empty() ||
      shape.back() != sum->layout.global_shape[0] || !(of_sum->reference_norm > 0))
    return 0;
  return allowed_error(reference, output, k, coarsest) * response->reference_norm /
         of_sum->reference_norm;
}

double error_of_loss(const Reference& reference, const RecordKey& key, double k, Dtype coarsest) {
  const Record* const begin = reference.begin_of_backward(key.step);
  if (size_of(coarsest) == 2 || role_of(key) != NameRole::kLoss || begin == nullptr) return 0;
  const Response* const gradient = reference.response(begin->key);
  const Response* const logits = reference.response(output_of(*begin));
  if (gradient == nullptr || logits == nullptr) return 0;
  const double error =
      own_error(reference, output_of(*begin), k, coarsest) * logits->reference_norm;
  const auto numel = static_cast<double>(numel_of(begin->layout.global_shape));
  return std::min(1.0, 4 / std::sqrt(numel)) * gradient->reference_norm * error +
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
