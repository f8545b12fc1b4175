// SPDX-License-Identifier: Apache-2.0
// Column and row layers, and a vocabulary that is always split.
#include "subjects/parallel/megatron/megatron_plan.h"

#include "subjects/parallel/tensor/autotp_plan.h"

namespace isoshard {

ShardPlan megatron_plan(const Model& model, int tp, std::int64_t make_vocab_size_divisible_by) {
  return column_row_plan(model, tp,
                         make_vocab_size_divisible_by == 0 ? 1 : make_vocab_size_divisible_by);
}

}  // namespace isoshard
