// SPDX-License-Identifier: Apache-2.0
/// `compare A B`: judges one bundle, loss curve or checkpoint against another.
#include "harness/compare/compare_command.h"

#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>
#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "core/base/error.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/provenance.h"
#include "harness/cli/report_file.h"
#include "harness/cli/report_printer.h"
#include "harness/compare/compare.h"
#include "harness/report/formats/earlier_reports.h"
#include "harness/report/formats/report_formats.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void declare_compare(OptionTable& table) {
  auto runs = table.group("runs to compare");
  runs("reference", po::value<std::string>(),
       "the trusted bundle, loss curve or checkpoint (first argument)");
  runs("actual", po::value<std::string>(),
       "the bundle, loss curve or checkpoint to judge (second argument)");
  runs("input-dir", po::value<std::string>(),
       "compare every run dumped in this folder with the reference there that has its settings");
  auto checkpoints = table.group("checkpoints");
  checkpoints("checkpoint", po::bool_switch(),
              "the two arguments are checkpoints: safetensors files, Hugging Face folders, or what "
              "train --save-checkpoint wrote");
  checkpoints("rename", po::value<std::string>(),
              "tensors of the second checkpoint, and what the first one calls them: FROM=TO, such "
              "as 'module.*=*'; several with commas, the first that fits counts");
  checkpoints("allow-different-dtypes", po::bool_switch(),
              "round the finer of two floating dtypes to the coarser one before comparing");
  auto judging = table.group("judging");
  judging("rtol", po::value<double>(),
          "allowed relative Frobenius error (default: the reference's responses if it has them, "
          "else every bit must be equal)");
  judging("require", po::value<std::string>()->default_value("any"),
          "any, or exact: a run that conforms only within tolerance exits with 1");
  judging("allow-different-settings", po::bool_switch(),
          "compare runs whose settings (manifest.json) differ, or that state none");
  judging(
      "allow-different-origins", po::bool_switch(),
      "take the judged run's word that its batches come from a file: how its samples were drawn, "
      "and the position of its sampler and masks, is not judged");
  judging("not-recorded", po::value<std::string>(),
          "records that the judged run need not have: KIND/NAME with * and ?, several with commas");
  judging("partial", po::value<std::string>(),
          "records that may be partial sums over ranks, such as scalar/loss; patterns as above");
  judging("grad-scale", po::value<double>(),
          "factor on the judged run's activation gradients, without a loss scale (default: what "
          "the trusted bundle says)");
  judging("only", po::value<std::string>(),
          "judge only these records and data ids: patterns as above; the verdict counts the others "
          "that "
          "the judged run lacks");
  judging("at-steps", po::value<std::string>(), "judge only these steps, such as 0,3");
  judging("mesh", po::value<std::string>(),
          "the mesh that the judged run must have, such as dp=2,tp=2");
  judging("device", po::value<std::string>()->default_value("cpu"),
          "where tensors are compared: cpu, cuda");
  auto output = table.group("output");
  output("output-dir", po::value<std::string>(),
         "write report.json, report.txt and junit.xml to this folder");
  output("made-by", po::value<std::string>(),
         "the command line that reports name, as a JSON list of words; for programs that call this "
         "one");
  output("seconds-before", po::value<double>()->default_value(0),
         "seconds that the last line adds to its own; for programs that call this one");
  output("findings", po::value<std::string>(),
         "findings of the program that calls this one, which are part of the verdict "
         "(docs/reference/report.md)");
  declare_report_file(table);
  table.positional.add("reference", 1).add("actual", 1);
}

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<std::string> patterns_of(std::string_view option, const std::string& text) {
  const std::vector<std::string> patterns = parts_of(text);
  for (const std::string& pattern : patterns) {
    if (pattern.find('/') == std::string::npos)
      throw UsageError(
          fmt::format("--{} must be KIND/NAME, such as scalar/grad_norm or */lm_head, "
                      "got '{}'",
                      option, pattern));
  }
  return patterns;
}

std::vector<int> steps_of(const std::string& text) {
  std::vector<int> steps;
  for (const std::string& part : parts_of(text)) {
    int step = 0;
    const char* const end = part.data() + part.size();
    if (std::from_chars(part.data(), end, step).ptr != end || part.empty() || step < 0)
      throw UsageError(fmt::format("--at-steps must be numbers from 0 on, got '{}'", text));
    steps.push_back(step);
  }
  return steps;
}

MeshShape mesh_of(const std::string& text) {
  std::vector<AxisDegree> axes;
  for (const std::string& part : parts_of(text)) {
    const std::size_t equals = part.find('=');
    int degree = 0;
    const char* const end = part.data() + part.size();
    if (equals == std::string::npos ||
        std::from_chars(part.data() + equals + 1, end, degree).ptr != end || degree < 1)
      throw UsageError(fmt::format("--mesh must be AXIS=RANKS, such as dp=2,tp=2, got '{}'", text));
    axes.push_back({parse_axis(part.substr(0, equals)), degree});
  }
  try {
    return MeshShape(std::move(axes));
  } catch (const MeshError& error) {
    throw UsageError(fmt::format("--mesh {}: {}", text, error.what()));
  }
}

/// Options that say something of checkpoints alone, or of anything but checkpoints.
void require_fitting_options(const ParsedOptions& options) {
  const bool are_checkpoints = options.get<bool>("checkpoint");
  const auto refuse = [&](const char* name, bool given) {
    if (given)
      throw UsageError(fmt::format("--{} must {} --checkpoint", name,
                                   are_checkpoints ? "be left out with" : "come with"));
  };
  if (!are_checkpoints) {
    refuse("rename", options.given("rename"));
    refuse("allow-different-dtypes", options.get<bool>("allow-different-dtypes"));
    return;
  }
  for (const char* name :
       {"input-dir", "partial", "grad-scale", "mesh", "only", "at-steps", "findings"})
    refuse(name, options.given(name));
  for (const char* name : {"allow-different-settings", "allow-different-origins"})
    refuse(name, options.get<bool>(name));
}

ComparePlan plan_of(const ParsedOptions& options) {
  require_fitting_options(options);
  ComparePlan plan;
  plan.are_checkpoints = options.get<bool>("checkpoint");
  plan.checkpoint.rounds_to_coarser = options.get<bool>("allow-different-dtypes");
  if (options.given("rename"))
    plan.checkpoint.renamings = parse_renamings(options.get<std::string>("rename"));
  const auto path = [&](const char* name) {
    return options.given(name) ? options.get<std::string>(name) : std::string();
  };
  plan.reference = path("reference");
  plan.actual = path("actual");
  plan.input_dir = path("input-dir");
  plan.require = parse_required_strength(options.get<std::string>("require"));
  if (options.given("rtol")) plan.rtol = options.get<double>("rtol");
  plan.allows_different_settings = options.get<bool>("allow-different-settings");
  if (options.get<bool>("allow-different-origins")) plan.rules.batch_file = BatchFileOf::kEither;
  if (options.given("not-recorded"))
    plan.rules.not_recorded = patterns_of("not-recorded", options.get<std::string>("not-recorded"));
  if (options.given("partial"))
    plan.rules.partial = patterns_of("partial", options.get<std::string>("partial"));
  if (options.given("only"))
    plan.rules.only = patterns_of("only", options.get<std::string>("only"));
  if (options.given("at-steps")) plan.rules.steps = steps_of(options.get<std::string>("at-steps"));
  if (options.given("mesh")) plan.rules.mesh = mesh_of(options.get<std::string>("mesh"));
  if (options.given("findings"))
    plan.given = read_given_findings(options.get<std::string>("findings"));
  if (options.given("grad-scale")) {
    plan.rules.grad_scale = options.get<double>("grad-scale");
    if (!(*plan.rules.grad_scale > 0) || std::isinf(*plan.rules.grad_scale))
      throw UsageError(
          fmt::format("--grad-scale must be a positive number, got {}", *plan.rules.grad_scale));
  }
  return plan;
}

/// nullptr: on this CPU.
std::unique_ptr<Comparer> comparer_of(const ParsedOptions& options, const ComparerMaker& on_gpu) {
  const std::string device = options.get<std::string>("device");
  if (device == "cpu") return nullptr;
  if (device != "cuda")
    throw UsageError(fmt::format("--device must be cpu or cuda, got {}", device));
  if (!on_gpu)
    throw UsageError(
        "device cuda must be a GPU that this program can use, got none: it was built without CUDA "
        "(./isoshard --gpu builds isoshard-gpu); take --device cpu, or see docs/reference/gpu.md");
  return on_gpu();
}

std::vector<std::string> made_by_of(const ParsedOptions& options) {
  if (!options.given("made-by")) return {};
  const std::string text = options.get<std::string>("made-by");
  try {
    return nlohmann::json::parse(text).get<std::vector<std::string>>();
  } catch (const nlohmann::json::exception&) {
    throw UsageError(fmt::format("--made-by must be a JSON list of words, got '{}'", text));
  }
}

int run_compare(const ParsedOptions& options, ComparePlan plan) {
  const std::filesystem::path folder =
      options.given("output-dir") ? options.get<std::string>("output-dir") : std::string();
  require_comparable(plan);
  const std::vector<std::string> made_by = made_by_of(options);
  const OutputFolder lock(folder, "--output-dir");
  set_aside_reports(folder);
  const ReportFile file(options);
  const TextOptions text = terminal_options();
  ReportPrinter printer(1, text);
  printer.count_earlier(options.get<double>("seconds-before"));
  const auto show = [&](const auto& item) { printer.add(item); };
  Report report = compare(plan, {.on_case = show, .on_curve = show});
  report.provenance = provenance_of(options);
  if (!made_by.empty()) report.provenance.command = made_by;
  printer.finish(report);
  write_report(folder, report, text);
  file.write(report, text);
  return report.exit_code;
}

}  // namespace

Command compare_command(std::string examples, CurveCeilings ceilings, ComparerMaker on_gpu) {
  return {"compare",
          "judge one dumped run against another",
          "compare [--checkpoint] REFERENCE ACTUAL [options]   or   compare --input-dir DIR "
          "[options]",
          std::move(examples),
          declare_compare,
          [ceilings, on_gpu = std::move(on_gpu)](const ParsedOptions& options) {
            ComparePlan plan = plan_of(options);
            const std::unique_ptr<Comparer> comparer = comparer_of(options, on_gpu);
            plan.comparer = comparer.get();
            plan.bounds_of = [ceilings](const Curve& actual) {
              return curve_bounds(actual, ceilings);
            };
            return run_compare(options, std::move(plan));
          },
          /*judges=*/true};
}

}  // namespace isoshard
