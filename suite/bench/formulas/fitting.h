// SPDX-License-Identifier: Apache-2.0
/// What fits into memory, by the formulas of memory_model.h.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"

namespace isoshard {

/// "80GB" (10^9), "80GiB" (2^30), "512MB", or a number of bytes.   Errors   UsageError.
[[nodiscard]] double parse_bytes(std::string_view text);
/// "74.5 GiB".
[[nodiscard]] std::string in_gib(double bytes);

/// The case with as many of its layers as fit, and if none does, with shorter samples, too; none if
/// that does not help.
[[nodiscard]] std::optional<Case> cut_to_fit(const Case& c, double bytes_of_world);

/// Ways to share `ranks` out over dp and tp, and pp where the subject has it.
[[nodiscard]] std::vector<Degrees> degrees_of(std::string_view subject, int ranks);

}  // namespace isoshard
