// SPDX-License-Identifier: Apache-2.0
/// The state that a rank keeps in memory shared with its controller, which can read it while the
/// rank hangs and after it died.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <string_view>

namespace isoshard {

/// A text that one process writes and another reads later. A reader that meets a write sees a cut
/// or mixed text, never more.
template <std::size_t kCapacity>
class SharedText {
 public:
  /// Safe in a signal handler.
  void set(std::string_view text) noexcept {
    const std::size_t count = std::min(text.size(), kCapacity - 1);
    std::memcpy(text_.data(), text.data(), count);
    text_[count] = '\0';
  }
  [[nodiscard]] const char* c_str() const noexcept { return text_.data(); }
  [[nodiscard]] std::string str() const {
    return {text_.data(), ::strnlen(text_.data(), kCapacity)};
  }

 private:
  std::array<char, kCapacity> text_;
};

/// Lives in zeroed memory.
struct RankSlot {
  SharedText<64> phase;
  SharedText<512> last_words;          ///< the uncaught exception that ended the process
  std::atomic<bool> has_dumped_stack;  ///< the answer to kDumpSignal is complete
};

}  // namespace isoshard
