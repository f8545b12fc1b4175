// SPDX-License-Identifier: Apache-2.0
/// `isoshard plot`: the figure and the statistics of a folder of loss curves.
#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>
#include <filesystem>

#include "app/commands.h"
#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/curve/curve_judge.h"
#include "harness/curve/curve_statistics.h"
#include "harness/plot/loss_figure.h"
#include "harness/verdict/exit_code.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
namespace fs = std::filesystem;

void declare_plot(OptionTable& table) {
  auto add = table.group("curves and figure");
  add("input-dir", po::value<std::string>(),
      "folder with loss_SUBJECT.json files (isoshard train --output-dir writes them)");
  add("output", po::value<std::string>(),
      "the figure: FILE.svg or FILE.png (default: loss_curves.png in --input-dir; 'none': no "
      "figure)");
  add("allow-different-settings", po::bool_switch(),
      "show curves whose settings (optimizer, clipping, precision, data order, ...) differ");
  table.aliases = {
      {"input", "input-dir"}, {"output-path", "output"}, {"loss-output-dir", "input-dir"}};
}

int run_plot(const ParsedOptions& options) {
  if (!options.given("input-dir"))
    throw UsageError("plot needs --input-dir DIR, a folder with loss_SUBJECT.json files");
  const fs::path folder = options.get<std::string>("input-dir");
  const fs::path output = options.given("output") ? fs::path(options.get<std::string>("output"))
                                                  : folder / "loss_curves.png";
  const std::vector<Curve> curves = read_curves(folder);
  if (!options.get<bool>("allow-different-settings")) {
    const Curve& baseline = baseline_of(curves);
    for (const Curve& curve : curves) {
      if (&curve != &baseline) refuse_different_settings(baseline, curve);
    }
  }
  std::string figure;
  if (output != "none") {
    require_output_file(output, "--output");
    const OutputFolder place(output.has_parent_path() ? output.parent_path() : fs::path("."),
                             "--output");
    write_file_atomically(output, figure_file(output, curves));
    figure = fmt::format("\nfigure: {}\n", output.string());
  }
  print("{}{}", statistics_table(curves), figure);
  return kExitConforms;
}

}  // namespace

Command plot_command() {
  return {"plot",
          "draw the loss curves of a folder, their differences and gradient norms; print their "
          "statistics",
          "plot --input-dir DIR [--output FILE.svg|FILE.png]",
          "  isoshard train --subjects reference,ddp,autotp --tp 2 --dp 2 --output-dir curves\n"
          "  isoshard plot --input-dir curves --output curves/loss_curves.svg",
          declare_plot,
          run_plot};
}

}  // namespace isoshard
