// SPDX-License-Identifier: Apache-2.0
/// The comparing loops for AVX-512 F, BW, DQ and VL.
#include "harness/stats/stats_loops.h"

#if defined(__x86_64__)

namespace isoshard {
namespace {

struct Avx512 {
  ISOSHARD_STATS_VECTORS(64);
  static constexpr const char* kName = "avx512";
};

}  // namespace

const StatsKernels kAvx512StatsKernels = StatsLoops<Avx512>::kKernels;

}  // namespace isoshard

#endif
