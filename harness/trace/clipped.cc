// SPDX-License-Identifier: Apache-2.0
// The factor that the reference's norm gives.
#include "harness/trace/clipped.h"

#include <algorithm>
#include <cmath>
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
