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
#include "suite/calibration/clean_cases.h"

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

int run(const ParsedOptions& options) {
  const auto seed = options.get<std::uint64_t>("seed");
  const auto first = options.get<std::int64_t>("first"), count = options.get<std::int64_t>("count");
  if (first < 0 || count < 1)
    throw UsageError(fmt::format("--first must be at least 0 and --count at least 1, got {} and {}",
                                 first, count));
  std::ofstream csv;
  if (options.given("csv")) csv.open(options.get<std::string>("csv"), std::ios::app);
  warm_up_kernels();
  const auto kind = options.get<std::string>("reference");
  if (kind != "plain" && kind != "auto")
    throw UsageError(fmt::format("unknown reference '{}'; it must be plain or auto", kind));
  Calibration calibration(seed, kind == "auto" ? ReferenceKind::kAuto : ReferenceKind::kPlain);
  Progress progress(static_cast<int>(count));
  for (std::int64_t index = first; index < first + count && interrupt_signal() == 0; ++index) {
    const Case c = clean_case(seed, index);
    progress.show(c.slug());
    Verdict verdict;
    try {
      verdict = calibration.run(index);
    } catch (const InfrastructureError&) {
      if (interrupt_signal() == 0) throw;
      break;  // what was measured until now is shown
    }
    if (csv.is_open()) append_csv(csv, index, verdict, c.dtype);
    if (count > 1 && verdict.status != Status::kConforms) {
      progress.clear();
      fmt::print("{}\n  repeat: {}\n", verdict_line(verdict), repeat_command(seed, index));
      std::fflush(stdout);
    }
    if (count == 1) fmt::print("{}\n", render(verdict, {.color = isatty(STDOUT_FILENO) != 0}));
  }
  progress.clear();
  fmt::print("{}", calibration.render());
  if (interrupt_signal() != 0) return 128 + interrupt_signal();
  return calibration.false_alarms().empty() ? kExitConforms : kExitDiverges;
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
