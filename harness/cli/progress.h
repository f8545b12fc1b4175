// SPDX-License-Identifier: Apache-2.0
/// A progress line on standard error, on a terminal only.
#pragma once
#include <string>
#include <string_view>

namespace isoshard {

/// Guarantees   nothing is written unless standard error is a terminal; the line is wiped when the
///              object ends. A forked rank, whose own standard error is captured, may also show its
///              progress.
class Progress {
 public:
  explicit Progress(int total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  [[nodiscard]] bool is_shown() const noexcept { return terminal_ >= 0; }
  /// Shows "[3/8] what"; counts one up if `advance`.
  void show(std::string_view what, bool advance = true);
  void clear();

 private:
  int total_;
  int done_ = 0;
  int terminal_ = -1;  ///< a descriptor of it; -1: there is none
};

}  // namespace isoshard
