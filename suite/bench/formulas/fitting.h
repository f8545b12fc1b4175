// SPDX-License-Identifier: Apache-2.0
/// What fits into memory, by the formulas of memory_model.h.
#pragma once
#include <optional>
#include <string>

#include "fixtures/cases/case.h"

namespace isoshard {

/// "74.5 GiB".
[[nodiscard]] std::string in_gib(double bytes);

/// The case with as many of its layers as fit, and if none does, with shorter samples, too; none if
/// that does not help.
[[nodiscard]] std::optional<Case> cut_to_fit(const Case& c, double bytes_of_world);

}  // namespace isoshard
