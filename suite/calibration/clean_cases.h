// SPDX-License-Identifier: Apache-2.0
/// Random correct cases, which a judge without false alarms must pass.
#pragma once
#include <cstdint>

#include "fixtures/cases/case.h"
#include "fixtures/cases/draws.h"

namespace isoshard {

/// Case `index` of the stream `seed`: architecture, sizes, heads and kv heads, odd lengths, dp, tp,
/// dtype, optimizer, attention, unequal counts, micro-batches, reduction of the loss, split
/// vocabulary, label smoothing, autocast, reduction order, all drawn; at most 6 ranks, 3 layers and
/// 300 tokens a sample.
///
/// Determinism   a function of (seed, index) and of what Case::validate allows: draws that it
///               refuses are drawn again.
[[nodiscard]] Case clean_case(std::uint64_t seed, std::int64_t index);

/// Numbers of heads that tp divides, and of kv heads that tp divides or that divide it.
/// `has_own_keys`   each query has a key and a value of its own
void draw_head_counts(Draws& draws, ModelConfig& config, int tp, bool has_own_keys);

}  // namespace isoshard
