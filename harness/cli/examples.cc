// SPDX-License-Identifier: Apache-2.0
// Examples within 80 columns.
#include "harness/cli/examples.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "harness/report/text/hanging.h"

namespace isoshard {
namespace {

constexpr std::size_t kIndent = 2, kDeeper = 6, kGoesOn = 20;

struct Example {
  std::string command, does;
};

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (!trimmed(text.substr(0, end)).empty()) lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::vector<Example> parsed(std::string_view examples) {
  std::vector<Example> found;
  for (const std::string_view line : lines_of(examples)) {
    const std::string_view text = trimmed(line);
    if (!found.empty() && line.find_first_not_of(' ') >= kGoesOn) {
      found.back().does += " " + std::string(text);
      continue;
    }
    const std::size_t gap = std::min(text.find("   "), text.size());
    Example next{std::string(text.substr(0, gap)), std::string(trimmed(text.substr(gap)))};
    if (!found.empty() && found.back().command.ends_with('\\')) {
      found.back().command.pop_back();
      next.command = found.back().command + next.command;
      found.pop_back();
    }
    found.push_back(std::move(next));
  }
  return found;
}

/// Words outside of quotes, each flag with its values.
std::vector<std::string> pieces_of(std::string_view command) {
  std::vector<std::string> words(1);
  bool is_quoted = false;
  for (const char c : command) {
    if (c == '"') is_quoted = !is_quoted;
    if (c == ' ' && !is_quoted) {
      if (!words.back().empty()) words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  std::vector<std::string> pieces;
  for (std::string& word : words) {
    if (word.empty()) continue;
    const bool is_value = !pieces.empty() && pieces.back().starts_with('-') &&
                          pieces.back().find(' ') == std::string::npos && !word.starts_with('-');
    if (is_value) {
      pieces.back() += " " + word;
    } else {
      pieces.push_back(std::move(word));
    }
  }
  return pieces;
}

std::string command_lines(std::string_view command) {
  std::string text, line(kIndent, ' ');
  bool is_begun = false;
  for (const std::string& piece : pieces_of(command)) {
    if (is_begun && line.size() + 1 + piece.size() + 2 > kLineWidth) {
      text += line + " \\\n";
      line = std::string(kDeeper, ' ') + piece;
      continue;
    }
    line += (is_begun ? " " : "") + piece;
    is_begun = true;
  }
  return text + line + "\n";
}

}  // namespace

std::string examples_in_columns(std::string_view examples) {
  const std::vector<Example> found = parsed(examples);
  std::size_t widest = 0;
  for (const Example& example : found) widest = std::max(widest, example.command.size());
  const std::size_t column = kIndent + widest + 2;
  const bool all_fit = std::ranges::all_of(
      found, [&](const Example& example) { return column + example.does.size() <= kLineWidth; });
  std::string text;
  for (const Example& example : found) {
    if (all_fit && !example.does.empty()) {
      text += std::string(kIndent, ' ') + example.command +
              std::string(column - kIndent - example.command.size(), ' ') + example.does + "\n";
      continue;
    }
    text += command_lines(example.command);
    if (!example.does.empty()) text += hanging(std::string(kDeeper, ' '), example.does);
  }
  return text;
}

}  // namespace isoshard
