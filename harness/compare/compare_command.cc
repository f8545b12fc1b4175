// SPDX-License-Identifier: Apache-2.0
/// `compare A B`: judges one bundle against another, or one loss curve against another.
#include "harness/compare/compare_command.h"

#include <boost/program_options/value_semantic.hpp>
#include <utility>

#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/compare/compare.h"
#include "harness/report/formats/report_formats.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void declare(OptionTable& table) {
  auto runs = table.group("runs to compare");
  runs("reference", po::value<std::string>(), "the trusted bundle, or loss curve (first argument)");
  runs("actual", po::value<std::string>(), "the bundle, or loss curve, to judge (second argument)");
  runs("input-dir", po::value<std::string>(),
       "compare every run dumped in this folder with the reference there that has its settings");
  auto judging = table.group("judging");
  judging("rtol", po::value<double>(),
          "allowed relative Frobenius error (default: the reference's responses if it has them, "
          "else every bit must be equal)");
  judging("require", po::value<std::string>()->default_value("any"),
          "exact: a run that conforms within tolerance only exits with 1; any");
  judging("allow-different-settings", po::bool_switch(),
          "compare runs whose settings (manifest.json) differ");
  auto output = table.group("output");
  output("output-dir", po::value<std::string>(),
         "write report.json, report.txt and junit.xml to this folder");
  output("verbose", po::bool_switch(), "show every tensor");
  table.positional.add("reference", 1).add("actual", 1);
}

ComparePlan plan_of(const ParsedOptions& options) {
  ComparePlan plan;
  const auto path = [&](const char* name) {
    return options.given(name) ? options.get<std::string>(name) : std::string();
  };
  plan.reference = path("reference");
  plan.actual = path("actual");
  plan.input_dir = path("input-dir");
  plan.require = parse_required_strength(options.get<std::string>("require"));
  if (options.given("rtol")) plan.rtol = options.get<double>("rtol");
  plan.allows_different_settings = options.get<bool>("allow-different-settings");
  return plan;
}

int run(const ParsedOptions& options, ComparePlan plan) {
  const std::filesystem::path folder =
      options.given("output-dir") ? options.get<std::string>("output-dir") : std::string();
  require_comparable(plan);
  const OutputFolder lock(folder, "--output-dir");
  const TextOptions text_options = terminal_options(options.get<bool>("verbose"));
  TextReport text(text_options);
  const auto show = [&](const auto& item) { print(text.add(item)); };
  const Report report = compare(plan, {.on_case = show, .on_curve = show});
  print(text.finish(report));
  write_report(folder, report, text_options);
  return report.exit_code;
}

}  // namespace

Command compare_command(std::string examples, CurveCeilings ceilings) {
  return {"compare",
          "judge one dumped run against another",
          "compare REFERENCE ACTUAL [options]   or   compare --input-dir DIR [options]",
          std::move(examples),
          declare,
          [ceilings](const ParsedOptions& options) {
            ComparePlan plan = plan_of(options);
            plan.bounds_of = [ceilings](const Curve& actual) {
              return curve_bounds(actual, ceilings);
            };
            return run(options, std::move(plan));
          }};
}

}  // namespace isoshard
