// SPDX-License-Identifier: Apache-2.0
// Lines are broken at blanks only.
#include "harness/report/text/hanging.h"

#include <algorithm>
#include <utility>

namespace isoshard {
namespace {

/// Without colors ("\033[1;31m") and the continuations of UTF-8.
std::size_t columns_of(std::string_view text) {
  std::size_t columns = 0;
  bool is_color = false;
  for (const char c : text) {
    if (c == '\033') {
      is_color = true;
    } else if (is_color) {
      is_color = c != 'm';
    } else if ((static_cast<unsigned char>(c) & 0xc0U) != 0x80U) {
      ++columns;
    }
  }
  return columns;
}

/// Puts word after word on lines that begin with `indent` blanks.
class Lines {
 public:
  Lines(std::string_view head, std::size_t indent, std::size_t width, std::string_view end)
      : text_(head), column_(columns_of(head)), indent_(indent), width_(width), end_(end) {}

  /// `gap`: the blanks before it, where it does not begin a line.
  void add(std::string_view word, std::string_view gap, bool is_last) {
    const std::size_t columns = columns_of(word), room = is_last ? 0 : end_.size();
    if (is_begun_ && column_ + gap.size() + columns + room > width_) {
      text_ += end_;
      text_ += "\n" + std::string(indent_, ' ');
      column_ = indent_;
    } else if (is_begun_) {
      text_ += gap;
      column_ += gap.size();
    }
    text_ += word;
    column_ += columns;
    is_begun_ = true;
  }

  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  std::string text_;
  std::size_t column_, indent_, width_;
  std::string_view end_;  ///< of a line that goes on
  bool is_begun_ = false;
};

std::string wrapped_line(std::string_view line, std::size_t width) {
  if (columns_of(line) <= width) return std::string(line);
  const std::size_t begin = std::min(line.find_first_not_of(' '), line.size());
  constexpr std::size_t kBehind = 4;
  Lines lines(line.substr(0, begin), begin + kBehind, width, "");
  line.remove_prefix(begin);
  std::string_view gap;
  while (!line.empty()) {
    const std::size_t end = std::min(line.find(' '), line.size());
    const std::size_t next = std::min(line.find_first_not_of(' ', end), line.size());
    lines.add(line.substr(0, end), gap, next == line.size());
    gap = line.substr(end, next - end);
    line.remove_prefix(next);
  }
  return lines.take();
}

}  // namespace

std::string hanging(std::string_view head, std::string_view text, std::size_t width) {
  Lines lines(head, columns_of(head), width, "");
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    lines.add(word, " ", text.empty());
  }
  return lines.take() + "\n";
}

std::string hanging_command(std::string_view head, const std::vector<std::string>& words,
                            std::size_t width) {
  Lines lines(head, columns_of(head), width, " \\");
  for (std::size_t i = 0; i < words.size(); ++i) lines.add(words[i], " ", i + 1 == words.size());
  return lines.take() + "\n";
}

std::string wrapped(std::string_view text, std::size_t width) {
  std::string result;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    result += wrapped_line(text.substr(0, end), width);
    if (end == text.npos) break;
    result += '\n';
    text.remove_prefix(end + 1);
  }
  return result;
}

}  // namespace isoshard
