// SPDX-License-Identifier: Apache-2.0
/// Low-precision products of an emulated rank.
#pragma once
#include <c10/core/DeviceType.h>

#include <optional>

#include "subjects/parallel/numerics_spec.h"

namespace isoshard {

/// While it lives, products on this thread and of tensors on `device` are in their dtype, by
/// torch's own autocast; without one it does nothing.
///
/// Requires     backward begins when it has ended. One at a time on a thread.
/// Guarantees   other emulated ranks are not touched: the cache of rounded weights, which all
///              threads share, is left out.
class EmulatedAutocast {
 public:
  EmulatedAutocast(const std::optional<LowPrecisionProducts>& products, c10::DeviceType device);
  ~EmulatedAutocast();
  EmulatedAutocast(const EmulatedAutocast&) = delete;
  EmulatedAutocast& operator=(const EmulatedAutocast&) = delete;

 private:
  c10::DeviceType device_;
  bool is_on_;
};

}  // namespace isoshard
