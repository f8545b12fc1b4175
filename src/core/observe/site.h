// SPDX-License-Identifier: Apache-2.0
/// Named points of model and training code, without ATen.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/mesh/layout.h"

namespace isoshard {

/// In this order a step produces them; kParam is recorded before the step (weights as read) and
/// after it.
enum class RecordKind : std::uint8_t {
  kParam,
  kGrad,
  kActivation,
  kActivationGrad,
  kOptimizer,
  kScalar,
  kDataId,
  kMask
};

/// param, grad, activation, activation_grad, optimizer, scalar, data_id, mask.
[[nodiscard]] std::string_view name_of(RecordKind kind) noexcept;

/// One named point. The sink counts repeated visits within a step itself (the record's call
/// number).
struct Site {
  RecordKind kind = RecordKind::kActivation;
  std::string name;  ///< Hugging Face module path or parameter name, plus listed suffix points
  Layout layout;
  /// What the recorded value is multiplied with against the true one (dp average, loss scale)
  double grad_scale = 1.0;
  /// Backward computes the value a second time (activation checkpointing). It is recorded as
  /// "<name>.recomputed", and must be what the forward pass had.
  bool recomputed = false;
};

}  // namespace isoshard
