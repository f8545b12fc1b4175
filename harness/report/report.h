// SPDX-License-Identifier: Apache-2.0
/// What a command found, as data: the one thing that verify, train, compare, experiment, golden
/// and bench return. Writers (harness/report/text, harness/report/json) turn it into a format; the
/// formats are listed in harness/report/formats.
#pragma once
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "harness/curve/curve.h"
#include "harness/curve/curve_judge.h"
#include "harness/report/tables.h"
#include "harness/verdict/exit_code.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// The schema of report.json, and of each verdict in it. Readers refuse others.
inline constexpr int kReportSchema = 2;

/// One action of a pipeline's schedule, as it would run with equal stages.
struct ReportAction {
  int rank = 0;               ///< of the pp axis
  double start = 0, end = 0;  ///< in units of one forward
  std::string label;          ///< "F0": what, and of which micro-batch; with several stages "1F0"
};

/// Where a report comes from, so that others can repeat it.
struct Provenance {
  std::vector<std::string> command;             ///< words of a command line, program first
  std::map<std::string, std::string> settings;  ///< every option that has a value
  std::map<std::string, std::string> versions;  ///< "isoshard" -> "0.1.0", "LibTorch", "CPU", ...
};

/// Collectives of one purpose, of one step on average.
struct ReportCollective {
  std::string purpose;                              ///< "grad_reduce"
  double calls_per_rank = 0, seconds_per_rank = 0;  ///< on the mean rank; waiting for others counts
  double bytes = 0;                                 ///< of all ranks
  double median_call_seconds = 0;                   ///< on the median rank
  /// In which a transfer was on its way and its rank did something else; none: not known.
  std::optional<double> hidden_seconds_per_rank = {};
};

/// Whether an injected fault was found as the catalog says.
struct ReportDetection {
  bool is_right = false;
  std::string problem;  ///< why not; empty if it was
  /// Of a whole catalog's run, as a row of its table: what was right of what was found, and how
  /// long it took. Then `is_right` asks for no cause.
  struct Row {
    std::string dtype;
    bool alarm = false, place = false, cause = false;
    double seconds = 0;
  };
  std::optional<Row> row = {};
};

/// One run that was judged tensor by tensor, or that could not be judged.
struct ReportCase {
  std::string name;                        ///< the slug of the case
  std::optional<Verdict> verdict = {};     ///< empty: the run could not be judged
  std::string failure = {};                ///< why it could not be judged; empty with a verdict
  int failure_code = kExitInfrastructure;  ///< the exit code that the failure has
  Rule rule = {};                          ///< by which an input was refused; none with a verdict
  /// What the verdict was made against: "plain", "emulated" or "both"; empty for two bundles.
  std::string against = {};
  std::string fault = {};  ///< the id of the injected fault; empty: none
  /// Why a run that conforms is not enough for what was asked (require_strength); empty: it is.
  std::string unmet = {};
  std::vector<ReportAction> schedule = {};  ///< of a pipeline; else empty
  /// How long collectives took in the run that was judged; no part of its verdict. Empty: not
  /// known.
  std::vector<ReportCollective> collective_times = {};
  /// Of a run that is to show that its fault is found: then this counts, and not the verdict.
  std::optional<ReportDetection> detection = {};

  [[nodiscard]] Status status() const noexcept;  ///< kIncomplete without a verdict
  /// That of its status or failure; diverges for one that conforms, but not as strongly as asked.
  [[nodiscard]] int exit_code() const noexcept;
};

/// What --require says: "any" (kNone) or "exact".
/// Errors   UsageError with a suggestion and the words.
[[nodiscard]] Strength parse_required_strength(const std::string& word);

/// Sets `unmet` of a case that conforms more weakly than `wanted`.
void require_strength(ReportCase& item, Strength wanted);

/// One training run and the verdict on its losses and norms, or why the run did not end.
struct ReportCurve {
  std::string name;                          ///< the slug of the case
  std::string copy_of = {};                  ///< as Verdict::copy_of
  Curve curve = {};                          ///< without steps if the run failed
  std::optional<CurveVerdict> verdict = {};  ///< empty: the run failed, or nothing judges it
  std::string failure = {};                  ///< why the run did not end; empty if it did
  int failure_code = kExitInfrastructure;    ///< the exit code that the failure has
  std::string fault = {};                    ///< the id of the injected fault; empty: none
  std::vector<std::string> remarks = {};     ///< lines that follow the verdict, without newlines

  [[nodiscard]] int exit_code() const noexcept;
};

/// What happened to one golden.
struct ReportGolden {
  std::string name;
  /// "match", "drift", "regression", "pending", "diverges", "accepted", "removed", "reviewed",
  /// "refused" or "incomplete".
  std::string status;
  std::string text;  ///< the lines to show, each ended by a newline
};

/// The tables and claims of one published experiment.
struct ReportExperiment {
  std::string name;       ///< "growth"
  bool holds = true;      ///< whether every claim of the experiment holds
  std::string text = {};  ///< the tables in the published form, each line ended by a newline
  std::string json = {};  ///< the same numbers: one JSON object
};

/// What `bench` timed or compared.
struct ReportBenchmark {
  std::string name;  ///< the slug of the case, or what was compared
  /// "measured", "does not conform", "regression" or "unclear" (the machine itself was slower).
  std::string status;
  std::string text;       ///< the lines to show, each ended by a newline
  std::string json = {};  ///< of one configuration: what results_*.json holds; else empty
};

/// Something that runs may exercise, and whether those of this report do.
struct ReportFeature {
  std::string group, name;
  std::size_t cases = 0;   ///< that exercise it
  std::string first = {};  ///< the name of the first of them; empty for none
  std::string flags = {};  ///< which make cases that do
};

/// Puts an exception into an item in place of its verdict, with its exit code. An input file that
/// changed while it was read (core/base/mapped_file.h) explains any exception, and takes its place.
void set_failure(ReportCase& item, const std::exception& error);
void set_failure(ReportCurve& item, const std::exception& error);

/// Everything that one command found. A part that a command does not have is empty.
///
/// Example
///     Report report;
///     report.add(ReportCase{.name = "qwen2_dp2", .verdict = judge(reference, trace, options)});
///     write_report("out", report);  // harness/report/formats/report_formats.h
///     return report.exit_code;
struct Report {
  std::vector<std::string> notes;  ///< lines to show before anything else, without newlines
  std::vector<ReportCase> cases;
  std::vector<ReportCurve> curves;
  std::vector<ReportGolden> goldens;
  std::vector<ReportExperiment> experiments;
  std::vector<ReportBenchmark> benchmarks;
  std::vector<ComparisonTables> tables;
  std::vector<ReportFeature> features;  ///< all that are known
  bool has_statistics = false;          ///< whether the curves are also shown side by side
  std::string summary;                  ///< one closing line, without a newline; may be empty
  /// Variables that were set and may decide how kernels compute (harness/world/machine.h).
  std::map<std::string, std::string> environment;
  Provenance provenance;
  int exit_code = kExitConforms;

  /// Appends, and combines the exit codes.
  ReportCase& add(ReportCase item);
  ReportCurve& add(ReportCurve item);
  ReportExperiment& add(ReportExperiment item);
  ReportGolden& add(ReportGolden item, int code);
  ReportBenchmark& add(ReportBenchmark item, int code);
};

}  // namespace isoshard
