// SPDX-License-Identifier: Apache-2.0
// The scope over torch's thread-local autocast state.
#include "subjects/model/ops/autocast.h"

#include <ATen/autocast_mode.h>

namespace isoshard {

AutocastScope::AutocastScope(at::DeviceType device, at::ScalarType dtype)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      previous_dtype_(at::autocast::get_autocast_dtype(device)) {
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
}

at::Tensor as_product_input(const at::Tensor& x) {
  const at::DeviceType device = x.device().type();
  if (!at::autocast::is_autocast_enabled(device) || x.scalar_type() != at::kFloat) return x;
  return x.to(at::autocast::get_autocast_dtype(device));
}

}  // namespace isoshard
