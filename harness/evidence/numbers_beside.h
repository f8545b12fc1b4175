// SPDX-License-Identifier: Apache-2.0
/// The numbers of both sides where they begin to differ.
#pragma once
#include <optional>

#include "harness/evidence/evidence.h"

namespace isoshard {

/// A corner of at most 6 x 5 numbers around the first element that differs, as the reference and
/// the first ranks that hold something of it have it; from the first number on where nothing
/// differs in value. Numbers are divided by their gradient scale, as for comparing. None where the
/// reference or every rank has let its bytes go, or the tensor is a single number.
[[nodiscard]] std::optional<NumbersBeside> numbers_beside(const Reference& reference,
                                                          const Trace& actual,
                                                          const RecordKey& key);

}  // namespace isoshard
