// SPDX-License-Identifier: Apache-2.0
/// "Did you mean" for names that a user mistyped.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace isoshard {

/// Levenshtein distance: single-character insertions, deletions and substitutions.
[[nodiscard]] std::size_t edit_distance(std::string_view a, std::string_view b);

/// " (did you mean 'x'?)" with the known name nearest to `wrong`, or "" if none is near.
///
/// Near is a distance of at most a third of the longer name (but 2 for short ones), letter case and
/// '-' against '_' not counted, or that one name begins with the other. A name without '/' is
/// compared with what follows the last '/' of the others. The first of equally near names wins.
[[nodiscard]] std::string did_you_mean(std::string_view wrong, std::span<const std::string> known);

/// "a, b, c", for messages that list the known names.
[[nodiscard]] std::string join_names(std::span<const std::string> names);

}  // namespace isoshard
