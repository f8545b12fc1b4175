// SPDX-License-Identifier: Apache-2.0
// Counting cores.
#include "harness/run/side_by_side.h"

#include <sched.h>

#include <algorithm>

namespace isoshard {

int num_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace isoshard
