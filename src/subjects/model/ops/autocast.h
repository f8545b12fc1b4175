// SPDX-License-Identifier: Apache-2.0
/// torch.autocast for the length of a scope.
#pragma once
#include <ATen/core/Tensor.h>

namespace isoshard {

/// As `with torch.autocast(device, dtype)`: linear layers, matrix products and attention round
/// their inputs to `dtype` and give `dtype`; every other op of our models runs in the type of its
/// inputs, mixed ones in the wider (docs/reference/models.md lists them).
///
/// Requires     the scope ends on the thread that began it, before backward.
/// Guarantees   restores what was set before; the casts of parameters that autocast keeps are
///              forgotten, so that no scope sees an older step's weights.
///
///     const AutocastScope autocast(ids.device().type(), at::kBFloat16);
///     const at::Tensor logits = model.forward(...);
class AutocastScope {
 public:
  AutocastScope(at::DeviceType device, at::ScalarType dtype);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType previous_dtype_;
};

/// What a product under the autocast of this thread sees of its input: fp32 rounded to its dtype,
/// anything else and without autocast the input itself.
[[nodiscard]] at::Tensor as_product_input(const at::Tensor& x);

}  // namespace isoshard
