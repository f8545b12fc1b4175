// SPDX-License-Identifier: Apache-2.0
/// Random correct cases of every subject, with the settings of `verify --preset thorough`.
#pragma once
#include <cstdint>

#include "fixtures/cases/case.h"

namespace isoshard {

/// Case `index` of the stream `seed`: a case of the preset thorough whose seed, sizes, heads,
/// degrees, batches, lengths and steps are drawn anew, and some of its settings: precision,
/// optimizer, schedule, clipping, loss, data, dropout, recomputation, buckets, reduction order,
/// frozen weights, and what only its subject takes. At most 8 ranks, 4 steps and 29 tokens a
/// sample.
///
/// Determinism   as clean_case.
[[nodiscard]] Case thorough_case(std::uint64_t seed, std::int64_t index);

}  // namespace isoshard
