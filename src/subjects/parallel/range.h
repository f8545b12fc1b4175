// SPDX-License-Identifier: Apache-2.0
/// A run of indices: rows of a parameter, entries of a vocabulary, elements of a flat buffer.
#pragma once
#include <compare>
#include <cstdint>

namespace isoshard {

struct Range {
  std::int64_t begin = 0, count = 0;
  friend auto operator<=>(const Range&, const Range&) = default;
};

}  // namespace isoshard
