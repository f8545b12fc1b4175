// SPDX-License-Identifier: Apache-2.0
/// Lines that fit a terminal of 80 columns.
#pragma once
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace isoshard {

inline constexpr std::size_t kLineWidth = 80;

/// `head`, then the words of `text`; what does not fit continues below the place where the text
/// began. A word that is longer than a line stays whole. Ends with a newline.
///
///     hanging("  data ids    ", "3 tensors, all equal")
[[nodiscard]] inline std::string hanging(std::string_view head, std::string_view text) {
  std::string lines(head);
  std::size_t column = head.size();
  bool is_begun = false;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (is_begun && column + 1 + word.size() > kLineWidth) {
      lines += "\n" + std::string(head.size(), ' ');
      column = head.size();
    } else if (is_begun) {
      lines += ' ';
      ++column;
    }
    lines += word;
    column += word.size();
    is_begun = true;
  }
  return lines + "\n";
}

}  // namespace isoshard
