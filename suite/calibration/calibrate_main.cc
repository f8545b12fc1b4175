// SPDX-License-Identifier: Apache-2.0
// `calibrate`: runs clean cases, prints how much of their
// tolerances they use, and exits 1 if one of them raised an alarm.
#include <fmt/format.h>
#include <unistd.h>

#include <boost/program_options/value_semantic.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "core/base/error.h"
#include "harness/cli/command.h"
#include "harness/cli/progress.h"
#include "harness/report/text/verdict_text.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"
#include "suite/calibration/calibration.h"
#include "suite/calibration/verdict_log.h"
#include "suite/reference/warm_up_training.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void declare(OptionTable& table) {
  auto add = table.options.add_options();
  add("seed", po::value<std::uint64_t>()->default_value(1), "seed of the stream of cases");
  add("first", po::value<std::int64_t>()->default_value(0), "number of the first case");
  add("count", po::value<std::int64_t>()->default_value(100),
      "number of cases; for one case the whole report is printed");
  add("reference", po::value<std::string>()->default_value("plain"),
      "plain (measures tolerances) or auto (what verify says)");
  add("cases", po::value<std::string>()->default_value("usual"),
      "usual (ddp and autotp) or thorough (every subject, the settings of verify --preset "
      "thorough)");
  add("record", po::value<std::string>(),
      "append the verdict of each case to this file, and leave out the cases that it has: a run "
      "that "
      "was ended goes on");
  add("csv", po::value<std::string>(), "append one line for each comparison to this file");
}

/// For whoever wants another statistic than the table's.
void append_csv(std::ofstream& csv, std::int64_t index, const Verdict& verdict, Dtype dtype) {
  for (const TensorComparison& t : verdict.tensors) {
    if (t.level != Level::kPerturbed) continue;
    csv << fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", index, name_of(dtype),
                       name_of(t.stage), t.key.name, t.stats.numel, t.stats.relative_error(),
                       t.allowed_relative_error, std::fabs(t.stats.scale() - 1),
                       t.allowed_scale_error, t.insensitive ? 1 : 0, t.scale_sensitivity,
                       t.rolled_error,
                       t.stats.max_abs_reference / std::sqrt(t.stats.sum_sq_reference),
                       t.weakness.empty() ? 0 : 1, t.elements, t.unmasked_share);
  }
  for (const PooledComparison& p : verdict.pools) {
    csv << fmt::format("{},{},{},pool {},{},{},{},{},{},{},{},{},{},{}\n", index, name_of(dtype),
                       name_of(p.stage), name_of(p.pool), p.first.step, p.name, p.tensors,
                       p.scale - 1, p.allowed_scale.least - 1, p.allowed_scale.most - 1, p.shift,
                       p.allowed_shift.least, p.allowed_shift.most, p.runs);
  }
}

/// Worlds inherit what a process otherwise finds out at the first step in a dtype.
std::vector<Case> cases_of_all_dtypes() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16})
    cases.emplace_back().dtype = dtype;
  return cases;
}

CaseStream stream_of(const ParsedOptions& options) {
  const auto name = options.get<std::string>("cases");
  for (const CaseStream stream : {CaseStream::kUsual, CaseStream::kThorough})
    if (name == name_of(stream)) return stream;
  throw UsageError(fmt::format("--cases must be usual or thorough, got '{}'", name));
}

ReferenceKind reference_of(const ParsedOptions& options) {
  const auto kind = options.get<std::string>("reference");
  if (kind == "plain") return ReferenceKind::kPlain;
  if (kind == "auto") return ReferenceKind::kAuto;
  throw UsageError(fmt::format("unknown reference '{}'; it must be plain or auto", kind));
}

int run(const ParsedOptions& options) {
  const auto seed = options.get<std::uint64_t>("seed");
  const auto first = options.get<std::int64_t>("first"), count = options.get<std::int64_t>("count");
  if (first < 0 || count < 1)
    throw UsageError(fmt::format("--first must be at least 0 and --count at least 1, got {} and {}",
                                 first, count));
  std::ofstream csv;
  if (options.given("csv")) csv.open(options.get<std::string>("csv"), std::ios::app);
  warm_up_kernels();
  warm_up_training(cases_of_all_dtypes());
  const CaseStream stream = stream_of(options);
  Calibration calibration(seed, reference_of(options), stream);
  VerdictLog log(options.given("record") ? options.get<std::string>("record") : "",
                 fmt::format("calibrate --cases {} --reference {} --seed {}", name_of(stream),
                             options.get<std::string>("reference"), seed));
  Progress progress(static_cast<int>(count));
  for (std::int64_t index = first; index < first + count && interrupt_signal() == 0; ++index) {
    if (log.has(index)) continue;
    const Case c = case_of(stream, seed, index);
    progress.show(c.slug());
    Verdict verdict;
    try {
      verdict = calibration.run(index);
    } catch (const Error& error) {
      if (interrupt_signal() != 0) break;  // what was measured until now is shown
      log.add_failure(index, c, error.what());
      progress.clear();
      fmt::print("FAILED {}: {}\n  repeat: {}\n", c.slug(), error.what(),
                 repeat_command(seed, index, stream));
      std::fflush(stdout);
      continue;
    }
    log.add(index, c, verdict);
    if (csv.is_open()) append_csv(csv, index, verdict, c.dtype);
    if (count > 1 && verdict.status != Status::kConforms) {
      progress.clear();
      fmt::print("{}\n  repeat: {}\n", verdict_line(verdict), repeat_command(seed, index, stream));
      std::fflush(stdout);
    }
    if (count == 1) fmt::print("{}\n", render(verdict, {.color = isatty(STDOUT_FILENO) != 0}));
  }
  progress.clear();
  fmt::print("{}{}", calibration.render(), log.summary());
  if (interrupt_signal() != 0) return 128 + interrupt_signal();
  if (log.failures() > 0) return kExitInfrastructure;
  return calibration.false_alarms().empty() && log.diverging() == 0 ? kExitConforms : kExitDiverges;
}

}  // namespace
}  // namespace isoshard

int main(int argc, char** argv) {
  isoshard::make_controller();
  isoshard::install_interrupt_handler();
  const isoshard::Command command{"run",
                                  "measure the judge on clean cases",
                                  "[options]",
                                  "  calibrate --count 500",
                                  isoshard::declare,
                                  isoshard::run};
  std::vector<std::string> arguments(argv + 1, argv + argc);
  arguments.insert(arguments.begin(), "run");
  return isoshard::run_command_line({&command, 1}, arguments);
}
