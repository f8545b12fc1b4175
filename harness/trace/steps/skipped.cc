// SPDX-License-Identifier: Apache-2.0
#include "harness/trace/steps/skipped.h"

#include "harness/trace/numbers.h"
#include "harness/trace/stage.h"

namespace isoshard {

bool is_skipped_step(const Reference& reference, int step) {
  const RecordKey flag = overflow_flag_of(step);
  return reference.find(flag) != nullptr && is_nonzero(reference.tensor(flag));
}

bool is_skipped_step(const RankTrace& rank, int step) {
  const Record* const flag = rank.find(overflow_flag_of(step));
  return flag != nullptr && flag->kept && is_nonzero(rank.tensor(*flag));
}

}  // namespace isoshard
