// SPDX-License-Identifier: Apache-2.0
/// Codes are gathered; the worst process tells what it found.
#include "app/options/job_report.h"

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "app/options/peers_words.h"
#include "core/base/error.h"
#include "harness/verdict/exit_code.h"

namespace isoshard {
namespace {

/// What one report has worst: a name, and why.
struct WorstResult {
  std::string name = "job";
  std::string why;
};

std::string why_of(const ReportCase& item) {
  if (!item.failure.empty()) return item.failure;
  if (!item.unmet.empty()) return item.unmet;
  if (item.detection.has_value()) return item.detection->problem;
  return item.verdict.has_value() ? item.verdict->reason : "";
}

std::string why_of(const ReportCurve& item) {
  if (!item.failure.empty()) return item.failure;
  return item.verdict.has_value() ? item.verdict->reason : "";
}

WorstResult worst_of(const Report& report) {
  for (const ReportCase& item : report.cases) {
    if (item.exit_code() == report.exit_code) return {item.name, why_of(item)};
  }
  for (const ReportCurve& item : report.curves) {
    if (item.exit_code() == report.exit_code) return {item.name, why_of(item)};
  }
  for (const ReportGolden& item : report.goldens) {
    if (item.status != "match") return {item.name, item.status};
  }
  return {};
}

/// The code of the job, and the process that has it: the first one.
std::pair<int, int> worst_process(Peers& peers, int own) {
  std::vector<std::int32_t> codes(static_cast<std::size_t>(peers.count()));
  const std::int32_t code = own;
  peers.gather(std::as_bytes(std::span(&code, 1)), std::as_writable_bytes(std::span(codes)));
  int worst = codes.front(), process = 0;
  for (std::size_t i = 1; i < codes.size(); ++i) {
    if (const int both = combine_exit_codes(worst, codes[i]); both != worst) {
      worst = both;
      process = static_cast<int>(i);
    }
  }
  return {worst, process};
}

void add_case(Report& report, ReportCase item, const std::string& who,
              const std::function<void(const ReportCase&)>& show) {
  const int code = item.failure_code;
  show(report.add(std::move(item)));
  report.summary +=
      fmt::format("{}but {} ends with exit code {}", report.summary.empty() ? "" : ", ", who, code);
}

}  // namespace

void agree_on_report(Launcher& launcher, Report& report,
                     const std::function<void(const ReportCase&)>& show) {
  Peers* const peers = launcher.peers();
  if (peers == nullptr) return;
  try {
    const auto [code, process] = worst_process(*peers, report.exit_code);
    if (process == 0) return;
    const WorstResult own = worst_of(report);
    const std::string name = broadcast_text(*peers, own.name, process);
    const std::string why = broadcast_text(*peers, own.why, process);
    const std::string who = who_is(*peers, process);
    if (peers->index() != 0) return;
    add_case(report,
             {.name = name,
              .failure = fmt::format(
                  "{} judges worse than rank 0: its exit code is {}, that of rank 0 {}{}{}; all "
                  "processes must have the same files, settings and environment",
                  who, code, report.exit_code, why.empty() ? "" : ": ", why),
              .failure_code = code},
             who, show);
  } catch (const CommError& error) {
    add_case(
        report,
        {.name = worst_of(report).name,
         .failure = fmt::format("not all processes came to the end of the run: {}", error.what()),
         .failure_code = kExitInfrastructure},
        "another process", show);
  }
}

}  // namespace isoshard
