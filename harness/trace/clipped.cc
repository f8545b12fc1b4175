// SPDX-License-Identifier: Apache-2.0
// The factor that the reference's norm gives, and names.
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

std::optional<WantedRecord> wanted_of(const Reference& reference, const RecordKey& key,
                                      const JudgePolicy& policy) {
  if (const Record* same = reference.find(key); same != nullptr) return WantedRecord{*same, key};
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
