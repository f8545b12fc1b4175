// SPDX-License-Identifier: Apache-2.0
/// Shows what runs and prints each result as soon as it is there: what the observers of commands
/// have in common.
#pragma once
#include <chrono>
#include <string>

#include "harness/cli/output.h"
#include "harness/cli/progress.h"
#include "harness/report/text/text_report.h"

namespace isoshard {

/// Prints the report of a command on the terminal while it grows.
class ReportPrinter {
 public:
  explicit ReportPrinter(int total, const TextOptions& options = terminal_options())
      : progress_(total), text_(options) {}

  [[nodiscard]] Progress& progress() noexcept { return progress_; }
  void note(const std::string& line) { print(text_.note(line)); }
  /// Takes the progress line away first.
  template <class Item>
  void add(const Item& item) {
    progress_.clear();
    print(text_.add(item));
  }
  /// What the caller of this program spent on the same report before it started it.
  void count_earlier(double seconds) noexcept { earlier_seconds_ += seconds; }
  void finish(const Report& report) {
    progress_.clear();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start_;
    print(text_.finish(report, earlier_seconds_ + taken.count()));
  }

 private:
  Progress progress_;
  TextReport text_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double earlier_seconds_ = 0;
};

}  // namespace isoshard
