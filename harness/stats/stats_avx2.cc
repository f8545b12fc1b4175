// SPDX-License-Identifier: Apache-2.0
/// The comparing loops for AVX2 and FMA.
#include "harness/stats/stats_loops.h"

#if defined(__x86_64__)

namespace isoshard {
namespace {

struct Avx2 {
  ISOSHARD_STATS_VECTORS(32);
  static constexpr const char* kName = "avx2";
};

}  // namespace

const StatsKernels kAvx2StatsKernels = StatsLoops<Avx2>::kKernels;

}  // namespace isoshard

#endif
