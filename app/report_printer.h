// SPDX-License-Identifier: Apache-2.0
/// Shows what runs and prints each result as soon as it is there: what the observers of commands
/// have in common.
#pragma once
#include <string>

#include "harness/cli/output.h"
#include "harness/cli/progress.h"
#include "harness/report/text/text_report.h"

namespace isoshard {

class ReportPrinter {
 public:
  explicit ReportPrinter(int total, const TextOptions& options = {})
      : progress_(total), text_(options) {}

  [[nodiscard]] Progress& progress() noexcept { return progress_; }
  void note(const std::string& line) { print(text_.note(line)); }
  /// Takes the progress line away first.
  template <class Item>
  void add(const Item& item) {
    progress_.clear();
    print(text_.add(item));
  }
  void finish(const Report& report) {
    progress_.clear();
    print(text_.finish(report));
  }

 private:
  Progress progress_;
  TextReport text_;
};

}  // namespace isoshard
