// SPDX-License-Identifier: Apache-2.0
/// Head and tail of a stream.
#include "harness/world/forked/captured_output.h"

#include <fmt/format.h>

#include <algorithm>

namespace isoshard {

void CapturedOutput::append(std::string_view bytes) {
  total_ += bytes.size();
  const std::size_t to_head = std::min(bytes.size(), kPart - head_.size());
  head_.append(bytes.substr(0, to_head));
  bytes.remove_prefix(to_head);
  if (bytes.size() > kPart) bytes.remove_prefix(bytes.size() - kPart);
  tail_.append(bytes);
  if (tail_.size() >= 2 * kPart) tail_.erase(0, tail_.size() - kPart);
}

std::string CapturedOutput::text() const {
  const std::string_view tail =
      std::string_view(tail_).substr(tail_.size() - std::min(tail_.size(), kPart));
  const std::uint64_t left_out = total_ - head_.size() - tail.size();
  if (left_out == 0) return head_ + std::string(tail);
  return fmt::format("{}\n[... {} bytes left out ...]\n{}", head_, left_out, tail);
}

std::string printable_tail(std::string_view text, std::size_t limit) {
  std::string result;
  if (text.size() > limit) {
    result = fmt::format("[... {} bytes left out ...]\n", text.size() - limit);
    text.remove_prefix(text.size() - limit);
  }
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    result += (code < 0x20 && c != '\n' && c != '\t') || code == 0x7f ? '?' : c;
  }
  return result;
}

}  // namespace isoshard
