// SPDX-License-Identifier: Apache-2.0
// The factor that the reference's norm gives, biases, and names.
#include "harness/trace/clipped.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "harness/trace/numbers.h"

namespace isoshard {
namespace {

/// What torch's clip_grad_norm_ multiplies gradients with; none where the norm says nothing.
std::optional<double> clip_factor_of(const Reference& reference, int step, double max_grad_norm) {
  if (max_grad_norm <= 0) return 1;
  const RecordKey key{step, RecordKind::kScalar, "grad_norm", 0};
  if (reference.find(key) == nullptr) return std::nullopt;
  const double norm = number_of(reference.tensor(key));
  if (!std::isfinite(norm)) return std::nullopt;
  return std::min(1.0, max_grad_norm / (norm + 1e-6));
}

}  // namespace

std::optional<RecordKey> final_gradient_of(const RecordKey& key) {
  constexpr std::string_view kMicroBatch = ".micro_batch";
  if (key.kind != RecordKind::kGrad || !key.name.ends_with(kMicroBatch)) return std::nullopt;
  return RecordKey{key.step, key.kind, key.name.substr(0, key.name.size() - kMicroBatch.size()), 0};
}

bool is_gradient_besides(const RecordKey& key) {
  return unclipped_of(key).has_value() || final_gradient_of(key).has_value();
}

std::optional<RecordKey> sum_of(const RecordKey& key) {
  constexpr std::string_view kPartial = ".partial";
  const bool is_activation =
      key.kind == RecordKind::kActivation || key.kind == RecordKind::kActivationGrad;
  if (!is_activation || !key.name.ends_with(kPartial)) return std::nullopt;
  RecordKey output = key;
  output.name.resize(key.name.size() - kPartial.size());
  return output;
}

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
  if (const std::optional<RecordKey> output = sum_of(key); output.has_value()) {
    const Record* whole = reference.find(*output);
    if (whole == nullptr) return std::nullopt;
    WantedRecord wanted{*whole, *output};
    wanted.record.key = key;
    return wanted;
  }
  const std::optional<RecordKey> unclipped = unclipped_of(key);
  if (!unclipped.has_value()) return std::nullopt;
  const Record* gradient = reference.find(*unclipped);
  if (gradient == nullptr) return std::nullopt;
  const std::optional<double> factor = clip_factor_of(reference, key.step, policy.max_grad_norm);
  if (!factor.has_value()) return std::nullopt;
  WantedRecord wanted{*gradient, *unclipped};
  wanted.record.key = key;
  wanted.record.grad_scale /= *factor;
  return wanted;
}

}  // namespace isoshard
