// SPDX-License-Identifier: Apache-2.0
/// A progress line on standard error, on a terminal only.
#pragma once
#include <chrono>
#include <string>
#include <string_view>

namespace isoshard {

/// "1.5 per s, 20 s left" of `done` of `total` parts after `seconds`; slow ones as "4.2 s each". ""
/// while nothing is done, or all is.
[[nodiscard]] std::string pace_in_words(int done, int total, double seconds);

/// Guarantees   nothing is written unless standard error is a terminal; the line never wraps and is
///              wiped when the object ends. A forked rank, whose own standard error is captured,
///              may also show its progress.
class Progress {
 public:
  explicit Progress(int total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  [[nodiscard]] bool is_shown() const noexcept { return terminal_ >= 0; }
  /// Shows "[3/8] what  4.2 s each, 25 s left"; counts one up if `advance`.
  void show(std::string_view what, bool advance = true);
  /// Shows "[3/8] what: step 5 of 100  3.1 per s, 31 s left", the pace being that of these parts. A
  /// first part begins the count anew.
  void show_part(std::string_view what, std::string_view part, int number, int total);
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  void write(std::string_view what, const std::string& pace) const;

  int total_;
  int done_ = 0;
  int terminal_ = -1;  ///< a descriptor of it; -1: there is none
  Clock::time_point start_ = Clock::now(), start_of_parts_ = start_;
  int first_part_ = 0;
};

}  // namespace isoshard
