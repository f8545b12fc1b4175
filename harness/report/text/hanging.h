// SPDX-License-Identifier: Apache-2.0
/// Lines that fit a terminal. A column is one character of UTF-8; colors take none.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

/// Columns of what is written to files and helps.
inline constexpr std::size_t kLineWidth = 80;

/// `head`, then the words of `text`; what does not fit continues below the place where the text
/// began. A word that is longer than a line stays whole. Ends with a newline.
///
///     hanging("  data ids    ", "3 tensors, all equal")
[[nodiscard]] std::string hanging(std::string_view head, std::string_view text,
                                  std::size_t width = kLineWidth);

/// As hanging, for words of a command: a line that goes on ends with a backslash, so that the
/// lines can be pasted into a shell as they are.
[[nodiscard]] std::string hanging_command(std::string_view head,
                                          const std::vector<std::string>& words,
                                          std::size_t width = kLineWidth);

/// Breaks each line of `text` that is longer than `width` at blanks. What does not fit continues
/// four columns behind the line's own indent.
[[nodiscard]] std::string wrapped(std::string_view text, std::size_t width);

}  // namespace isoshard
