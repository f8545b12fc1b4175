// SPDX-License-Identifier: Apache-2.0
/// Text of unknown origin made safe to print.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace isoshard {

/// Every byte outside printable ASCII as \xHH, and at most `max_bytes` of the text, followed by
/// "..." if it was longer. For messages about refused input: no escape sequence of a file reaches a
/// terminal.
[[nodiscard]] inline std::string printable(std::string_view text, std::size_t max_bytes = 120) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15U];
    }
  }
  if (text.size() > max_bytes) out += "...";
  return out;
}

/// What HTML and XML write for a character that they give a meaning to, in text and in attributes
/// in double quotes; empty for every other one.
[[nodiscard]] constexpr std::string_view entity_of(char c) noexcept {
  switch (c) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    default:
      return {};
  }
}

}  // namespace isoshard
