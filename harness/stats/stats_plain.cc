// SPDX-License-Identifier: Apache-2.0
/// The comparing loops for what every CPU of the architecture has.
#include "harness/stats/stats_loops.h"

namespace isoshard {
namespace {

struct Plain {
  ISOSHARD_STATS_VECTORS(16);
  static constexpr const char* kName = "plain";
};

}  // namespace

const StatsKernels kPlainStatsKernels = StatsLoops<Plain>::kKernels;

}  // namespace isoshard
