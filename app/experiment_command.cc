// SPDX-License-Identifier: Apache-2.0
/// `isoshard experiment KIND`: how far tensor parallelism moves a forward pass, in the published
/// tables.
#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>
#include <sstream>

#include "app/commands.h"
#include "app/options/attach_options.h"
#include "core/base/error.h"
#include "fixtures/cases/device_settings.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/progress.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"
#include "harness/world/warm_up.h"
#include "suite/published/experiment.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
using Strings = std::vector<std::string>;

void declare_experiment(OptionTable& table) {
  const auto list = [] { return po::value<Strings>()->multitoken()->composing(); };
  auto run = table.group("experiment");
  run("kind", po::value<std::string>(), "init, column-row, stack or growth");
  run("full", po::bool_switch(),
      "the published sizes (growth: up to 40 minutes on 2 cores); else small ones, which take "
      "seconds");
  run("seed", po::value<std::uint64_t>(), "of inputs and weights");
  auto arithmetic = table.group("mesh and arithmetic");
  arithmetic("tp", list(), "tensor-parallel degree (init: several, 1,2,4)");
  arithmetic("dtype", list(), "bf16 fp32 fp64 (default: the experiment's)");
  arithmetic("device", po::value<std::string>(),
             "where tensors of all ranks are: cpu (default), cuda");
  arithmetic("order", list(),
             "reduction order: ordered ring tree (default: ring; column-row: all)");
  auto sizes = table.group("sizes");
  sizes("layers", po::value<std::int64_t>(), "layers of the transformer, or column-row pairs");
  sizes("hidden-size", po::value<std::int64_t>(), "width of the residual stream");
  sizes("heads", po::value<std::int64_t>(), "attention heads");
  sizes("ffn-size", po::value<std::int64_t>(), "width of the MLP; column-row: length of the sums");
  sizes("seq-length", po::value<std::int64_t>(), "tokens per sample");
  sizes("batch-size", po::value<std::int64_t>(), "samples");
  auto output = table.group("output");
  output("output-dir", po::value<std::string>(),
         "write report.json, report.txt and junit.xml to this folder");
  declare_report_file(table);
  table.positional.add("kind", 1);
  table.aliases = {{"tp-size", "tp"},
                   {"num-layers", "layers"},
                   {"reduction-order", "order"},
                   {"num-heads", "heads"}};
}

// `--tp 1,2` and `--tp 1 2` are the same.
Strings list_of(const ParsedOptions& options, const std::string& name) {
  Strings parts;
  for (const std::string& item : options.get<Strings>(name)) {
    std::istringstream stream(item);
    for (std::string part; std::getline(stream, part, ',');) {
      if (!part.empty()) parts.push_back(part);
    }
  }
  return parts;
}

int degree_of(const std::string& text) {
  std::istringstream stream(text);
  int degree = 0;
  if (!(stream >> degree) || !stream.eof())
    throw UsageError(fmt::format("--tp must be a whole number, got '{}'", text));
  return degree;
}

template <class T>
void override_with(const ParsedOptions& options, const std::string& name, T& target) {
  if (options.given(name)) target = options.get<T>(name);
}

ExperimentSettings settings_of(const ParsedOptions& options, ExperimentKind kind) {
  ExperimentSettings settings = default_settings(kind, options.get<bool>("full"));
  const auto replace = [&](const char* name, auto& target, auto parse) {
    if (!options.given(name)) return;
    target.clear();
    for (const std::string& part : list_of(options, name)) target.push_back(parse(part));
  };
  replace("tp", settings.tp, degree_of);
  replace("dtype", settings.dtypes, parse_dtype);
  replace("order", settings.orders, parse_reduction_order);
  override_with(options, "layers", settings.layers);
  override_with(options, "hidden-size", settings.hidden_size);
  override_with(options, "heads", settings.num_heads);
  override_with(options, "ffn-size", settings.ffn_size);
  override_with(options, "seq-length", settings.seq_length);
  override_with(options, "batch-size", settings.batch_size);
  override_with(options, "seed", settings.seed);
  if (options.given("device"))
    settings.device = parse_device_kind(options.get<std::string>("device"));
  settings.validate(kind);
  return settings;
}

int run_experiments(const ParsedOptions& options) {
  refuse_several_processes("experiment");
  if (!options.given("kind"))
    throw UsageError("nothing selected: name an experiment: init, column-row, stack or growth");
  const ExperimentKind kind = parse_experiment_kind(options.get<std::string>("kind"));
  const ExperimentSettings settings = settings_of(options, kind);
  const std::filesystem::path folder =
      options.given("output-dir") ? options.get<std::string>("output-dir") : std::string();
  const OutputFolder lock(folder, "--output-dir");
  set_aside_reports(folder);
  const ReportFile file(options);
  warm_up_kernels();
  Progress progress(num_parts(kind, settings));
  Report report = report_experiment(kind, settings, [&](std::string_view part) {
    progress.show(fmt::format("{}: {}", name_of(kind), part));
  });
  progress.clear();
  report.provenance = provenance_of(options);
  print(text_of(report, terminal_options()));
  if (report.experiments.empty()) return report.exit_code;
  write_report(folder, report);
  file.write(report, {});
  return report.exit_code;
}

}  // namespace

Command experiment_command() {
  return {"experiment",
          "measure how far tensor parallelism moves a forward pass, in the tables of "
          "docs/internals/experiments.md",
          "experiment init|column-row|stack|growth [options]",
          "  isoshard experiment init                           initial weights of tp 1, 2 and 4 "
          "are bit-equal\n"
          "  isoshard experiment column-row                     column-parallel is exact, "
          "row-parallel is not: each reduction order\n"
          "  isoshard experiment stack --order ring,tree        how 16 column-row pairs add up\n"
          "  isoshard experiment growth --full --output-dir r   28 layers at the published sizes, "
          "bf16 and fp32",
          declare_experiment,
          run_experiments,
          /*judges=*/true};
}

}  // namespace isoshard
