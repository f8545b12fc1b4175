// SPDX-License-Identifier: Apache-2.0
// The factor that the reference's norm gives, and biases.
#include "harness/trace/wanted_record.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "harness/trace/run_view.h"

namespace isoshard {
namespace {

/// What torch's clip_grad_norm_ multiplies gradients with; none where the norm says nothing.
std::optional<double> clip_factor_of(const Reference& reference, int step, double max_grad_norm) {
  if (max_grad_norm <= 0) return 1;
  const std::optional<double> norm = RunView(reference).grad_norm(step);
  if (!norm.has_value() || !std::isfinite(*norm)) return std::nullopt;
  return std::min(1.0, max_grad_norm / (*norm + 1e-6));
}

}  // namespace

BiasOfModule bias_of(const Reference& reference, const RecordKey& output) {
  const std::string bias = output.name + ".bias";
  const auto read = [&](int step, const std::string& name) {
    // what the step before has left, which is recorded behind what the first step reads
    return reference.find(step == 0 ? RecordKey{0, RecordKind::kParam, name, 0}
                                    : RecordKey{step - 1, RecordKind::kParam, name, step == 1});
  };
  if (read(0, output.name + ".weight") == nullptr) return {};
  const Record* const found = read(output.step, bias);
  return {found != nullptr || read(0, bias) == nullptr, found};
}

std::optional<WantedRecord> wanted_of(const Reference& reference, const RecordKey& key,
                                      const JudgePolicy& policy) {
  if (const Record* same = reference.find(key); same != nullptr) return WantedRecord{*same, key};
  const NameRole role = role_of(key);
  if (role != NameRole::kSummand && role != NameRole::kClipped) return std::nullopt;
  const RecordKey base = base_of(key);
  const Record* const of_base = reference.find(base);
  if (of_base == nullptr) return std::nullopt;
  WantedRecord wanted{*of_base, base};
  wanted.record.key = key;
  if (role == NameRole::kSummand) return wanted;
  const std::optional<double> factor = clip_factor_of(reference, key.step, policy.max_grad_norm);
  if (!factor.has_value()) return std::nullopt;
  wanted.record.grad_scale /= *factor;
  return wanted;
}

}  // namespace isoshard
