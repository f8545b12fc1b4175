// SPDX-License-Identifier: Apache-2.0
// Column and row layers, and a vocabulary that is always split.
#include "parallel/megatron/megatron_plan.h"

#include "parallel/tensor/autotp_plan.h"

namespace isoshard {

ShardPlan megatron_plan(const Model& model, int tp, std::int64_t vocab_multiple) {
  return column_row_plan(model, tp, vocab_multiple == 0 ? 1 : vocab_multiple);
}

}  // namespace isoshard
