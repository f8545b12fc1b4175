// SPDX-License-Identifier: Apache-2.0
/// Shows which run trains, and prints each verdict as soon as it is there.
#pragma once
#include <string>

#include "harness/cli/report_printer.h"
#include "suite/train/train.h"

namespace isoshard {

class PrintRuns : public TrainObserver {
 public:
  /// `steps`: of each run.
  PrintRuns(ReportPrinter& printer, int steps) : printer_(printer), steps_(steps) {}

  void on_start(const std::string& run) override { printer_.progress().show(run); }
  [[nodiscard]] bool watches_steps() const override { return printer_.progress().is_shown(); }
  void on_step(const std::string& run, int step) override {
    printer_.progress().show_part(run, "step", step + 1, steps_);
  }
  void on_curve(const ReportCurve& item) override { printer_.add(item); }
  void on_note(const std::string& line) override { printer_.note(line); }

 private:
  ReportPrinter& printer_;
  int steps_;
};

}  // namespace isoshard
