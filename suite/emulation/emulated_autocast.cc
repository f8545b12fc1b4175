// SPDX-License-Identifier: Apache-2.0
// torch's autocast state of one thread.
#include "suite/emulation/emulated_autocast.h"

#include <ATen/autocast_mode.h>

#include "suite/emulation/emulated_reduction.h"

namespace isoshard {

EmulatedAutocast::EmulatedAutocast(const std::optional<LowPrecisionProducts>& products,
                                   at::DeviceType device)
    : device_(device), is_on_(products.has_value()) {
  if (!is_on_) return;
  at::autocast::set_autocast_dtype(device_, float_type_of(products->dtype));
  at::autocast::set_autocast_cache_enabled(false);
  at::autocast::set_autocast_enabled(device_, true);
}

EmulatedAutocast::~EmulatedAutocast() {
  if (is_on_) at::autocast::set_autocast_enabled(device_, false);
}

}  // namespace isoshard
