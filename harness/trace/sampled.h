// SPDX-License-Identifier: Apache-2.0
/// Which elements of a tensor a rank keeps that compares it and lets the rest go.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "harness/trace/record.h"

namespace isoshard {

/// A tensor of no more elements is kept as a whole.
inline constexpr std::int64_t kLeastSampled = 2048;

/// Indices into the flattened local tensor of `numel` elements, in ascending order: 16 runs of 32
/// elements, one in each sixteenth of the tensor, at a place that a hash of run, rank and record
/// gives. All indices where there are no more than 512 elements.
///
/// Determinism   the same for the same arguments, on every machine.
[[nodiscard]] std::vector<std::int64_t> sampled_positions(std::string_view run, int rank,
                                                          const RecordKey& key, std::int64_t numel);

}  // namespace isoshard
