// SPDX-License-Identifier: Apache-2.0
/// What `isoshard bench ACTION` does besides timing one configuration. Each returns an exit code.
#pragma once
#include <string>

#include "harness/cli/options.h"
#include "harness/cli/report_file.h"
#include "suite/bench/bench.h"
#include "suite/bench/bench_text.h"

namespace isoshard {

/// What an action prints, and the page of it that --report asks for.
class BenchOutput {
 public:
  /// Errors   as ReportFile.
  explicit BenchOutput(const ParsedOptions& options);
  /// What --quiet leaves out.
  void show(const Lines& lines, bool is_gated);
  /// What is printed always.
  void conclude(const Lines& lines, bool is_gated) { conclude(text_of(lines, is_gated)); }
  void conclude(const std::string& text);
  /// Writes the page. Returns the code.
  /// `json`   as ReportBenchmark.   Errors   as write_file_atomically.
  int finish(const std::string& name, const std::string& status, int code,
             const std::string& json = "") const;
  /// Prints a verdict that is none to time anything on, and finishes with it.
  int finish_at_gate(const std::string& name, const GateResult& gate);

 private:
  const ParsedOptions& options_;
  ReportFile file_;
  std::string text_;
};

/// Two sides: pairs of runs. One side, a stored result: whether this program is slower than then.
[[nodiscard]] int bench_compare(const ParsedOptions& options);
/// Errors   UsageError with the bytes and, where there is one, a command that fits, if what is
///          predicted for all ranks together is more than the machine has available.
void refuse_without_memory(const BenchPlan& plan);

}  // namespace isoshard
