// SPDX-License-Identifier: Apache-2.0
/// Where a rank's tensor first differs from the reference.
#pragma once
#include <optional>

#include "harness/ids/named_values.h"
#include "harness/trace/reference.h"
#include "harness/verdict/parts/held.h"

namespace isoshard::detail {

/// The coordinates of an element in a tensor.
[[nodiscard]] Shape coordinates_of(const Shape& shape, std::int64_t index);

/// Adds an element to the numbers of a finding: rank, index, reference and actual, and "first" with
/// them in words. `actual` is nothing where the rank's tensor was not kept.
void add_element(NamedValues& measured, int rank, const Shape& coordinates, double reference,
                 std::optional<double> actual);

/// Adds the first element that differs; nothing where none does.
void add_first_bad_element(NamedValues& measured, const Reference& reference, const Record& wanted,
                           const Held& held);

}  // namespace isoshard::detail
