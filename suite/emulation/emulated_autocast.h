// SPDX-License-Identifier: Apache-2.0
/// Low-precision products of an emulated rank.
#pragma once
#include <optional>

#include "subjects/parallel/numerics_spec.h"

namespace isoshard {

/// While it lives, products on this thread are in their dtype, by torch's own autocast;
/// without one it does nothing.
///
/// Requires     backward begins when it has ended. One at a time on a thread.
/// Guarantees   other emulated ranks are not touched: the cache of rounded weights, which all
///              threads share, is left out.
class EmulatedAutocast {
 public:
  explicit EmulatedAutocast(const std::optional<LowPrecisionProducts>& products);
  ~EmulatedAutocast();
  EmulatedAutocast(const EmulatedAutocast&) = delete;
  EmulatedAutocast& operator=(const EmulatedAutocast&) = delete;

 private:
  bool is_on_;
};

}  // namespace isoshard
