// SPDX-License-Identifier: Apache-2.0
/// How fast this machine multiplies matrices: what utilization is measured against.
#pragma once
#include <cstdint>

#include "core/base/dtype.h"

namespace isoshard {

struct GemmCeiling {
  double flops_per_second = 0;
  std::int64_t size = 0;  ///< of the square matrices that reached it
  int threads = 1;
};

/// The best of several square products of this dtype in one process of `threads` threads.
/// Ranks   called by the controller; forks a world of one.
[[nodiscard]] GemmCeiling measure_gemm_ceiling(Dtype dtype, int threads);

}  // namespace isoshard
