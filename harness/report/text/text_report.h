// SPDX-License-Identifier: Apache-2.0
/// A report for people to read: on the terminal while it grows, and as report.txt.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/report/report.h"
#include "harness/report/text/verdict_text.h"

namespace isoshard {

/// How much is told.
enum class Detail : std::uint8_t {
  kSummary,  ///< the closing line alone
  kBrief,    ///< a line for what conforms, a card for what does not, the closing line
  kFull,     ///< everything
};

struct TextOptions {
  RenderOptions verdict;  ///< also decides whether tables list every module
  Detail detail = Detail::kFull;
  bool shows_tables = false;  ///< of a brief report: whoever reads it asked for them
  int log_interval = 0;       ///< show the numbers of every so many steps of a curve; 0: of none
};

/// Writes a report part by part, so that a command can print each part as soon as it is known.
/// Cases that are told in full, tables, experiments and statistics are separated by blank lines;
/// notes, lines of cases, curves and goldens follow each other line by line.
///
/// Guarantees   the texts that are returned, put together, are text_of the report that has the same
///              parts in the same order.
///
///     TextReport text(options);
///     print(text.add(report.add(std::move(judged))));   // for each case
///     print(text.finish(report));                       // tables, statistics and summary
class TextReport {
 public:
  explicit TextReport(TextOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string note(const std::string& line);
  [[nodiscard]] std::string add(const ReportCase& item);
  [[nodiscard]] std::string add(const ReportCurve& item);
  [[nodiscard]] std::string add(const ReportGolden& item);
  [[nodiscard]] std::string add(const ReportExperiment& item);
  [[nodiscard]] std::string add(const ReportBenchmark& item);
  /// What closes the report: tables, statistics, how to repeat a run that is not as it should be,
  /// and the summary with the seconds that the command took.
  [[nodiscard]] std::string finish(const Report& report, std::optional<double> seconds = {});

 private:
  [[nodiscard]] std::string brief(const ReportCase& item);
  [[nodiscard]] std::string full(const ReportCase& item);
  /// The card of what is not as it should be.
  [[nodiscard]] std::string card(const ReportCase& item) const;
  [[nodiscard]] std::string repeat(const std::vector<std::string>& command);
  /// Broken at the columns of the terminal.
  [[nodiscard]] std::string fit(const std::string& text) const;
  [[nodiscard]] bool is_brief() const { return options_.detail == Detail::kBrief; }
  [[nodiscard]] bool is_summary() const { return options_.detail == Detail::kSummary; }
  /// `text` after a blank line, if anything stands before it.
  [[nodiscard]] std::string block(std::string text);
  [[nodiscard]] std::string lines(std::string text);

  TextOptions options_;
  bool is_empty_ = true, ends_with_block_ = false;
};

/// What the runs of a report exercise and what not, as two tables, each line ended by a newline.
[[nodiscard]] std::string features_text(const std::vector<ReportFeature>& features);

/// The whole report.
/// Determinism   a function of its arguments.
[[nodiscard]] std::string text_of(const Report& report, const TextOptions& options = {});

}  // namespace isoshard
