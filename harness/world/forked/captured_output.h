// SPDX-License-Identifier: Apache-2.0
/// The output of a rank: its head and its tail, in bounded memory.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace isoshard {

/// Guarantees   holds at most 2 x kPart bytes (twice that while it is appended to), however much is
///              appended.
class CapturedOutput {
 public:
  static constexpr std::size_t kPart = 64 * 1024;
  void append(std::string_view bytes);
  /// The whole output, or head, "[... N bytes left out ...]", tail.
  [[nodiscard]] std::string text() const;

 private:
  std::string head_;
  /// The last bytes after the head; cut back to kPart when it reaches twice that.
  std::string tail_;
  std::uint64_t total_ = 0;
};

/// For reports: control characters (but newline and tab) become '?', and all but the last `limit`
/// bytes is left out.
[[nodiscard]] std::string printable_tail(std::string_view text, std::size_t limit);

}  // namespace isoshard
