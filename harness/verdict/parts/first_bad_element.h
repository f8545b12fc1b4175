// SPDX-License-Identifier: Apache-2.0
/// Where a rank's tensor first differs from the reference, in words.
#pragma once
#include <string>

#include "harness/trace/reference.h"
#include "harness/verdict/parts/held.h"

namespace isoshard::detail {

/// "; first on rank 1 at [0, 3]: reference 1.5, actual 2"; empty where nothing differs. The rank's
/// number is left out where its tensor was not kept.
[[nodiscard]] std::string first_bad_element(const Reference& reference, const Record& wanted,
                                            const Held& held);

}  // namespace isoshard::detail
