// SPDX-License-Identifier: Apache-2.0
/// `isoshard compare A B`: judges one bundle against another, or one loss curve against another.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/output_folder.h"
#include "core/base/error.h"
#include "harness/bundle/bundle.h"
#include "harness/curve/curve_judge.h"
#include "harness/judge/compare_bundles.h"
#include "harness/report/json/verdict_json.h"
#include "harness/report/text/verdict_text.h"
#include "harness/verdict/exit_code.h"
#include "suite/train/judge_training.h"
#include "suite/verify/dumped_runs.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

void declare(OptionTable& table) {
  auto add = table.options.add_options();
  add("reference", po::value<std::string>(), "the trusted bundle, or loss curve (first argument)");
  add("actual", po::value<std::string>(), "the bundle, or loss curve, to judge (second argument)");
  add("input-dir", po::value<std::string>(),
      "compare every run dumped in this folder with the reference there that has its settings");
  add("rtol", po::value<double>(),
      "allowed relative Frobenius error (default: the reference's responses if it has them, else "
      "bit-equal)");
  add("allow-different-settings", po::bool_switch(),
      "compare runs whose settings (manifest.json) differ");
  add("output-dir", po::value<std::string>(), "write report.json and report.txt to this folder");
  add("verbose", po::bool_switch(), "show every tensor");
  table.positional.add("reference", 1).add("actual", 1);
}

std::vector<DumpedPair> pairs_of(const ParsedOptions& options) {
  const bool has_both = options.given("reference") && options.given("actual");
  if (options.given("input-dir")) {
    if (options.given("reference"))
      throw UsageError("compare takes two bundles or --input-dir DIR, not both");
    return dumped_pairs(options.get<std::string>("input-dir"));
  }
  if (!has_both)
    throw UsageError(
        "compare needs two bundles: isoshard compare REFERENCE ACTUAL; or --input-dir DIR");
  return {{options.get<std::string>("reference"), options.get<std::string>("actual")}};
}

void check_rtol(const ParsedOptions& options) {
  if (options.given("rtol") &&
      !(options.get<double>("rtol") >= 0 && options.get<double>("rtol") < 1))
    throw UsageError("--rtol must be 0 or more and below 1: at 1 a run of zeros would pass");
}

struct LossGap {
  double size = 0;
  int step = 0;
};

/// The largest of the steps that both have.
LossGap loss_gap(const Curve& reference, const Curve& actual) {
  LossGap gap;
  for (std::size_t i = 0; i < std::min(reference.steps.size(), actual.steps.size()); ++i) {
    const double difference = std::fabs(actual.steps[i].loss - reference.steps[i].loss);
    if (difference > gap.size) gap = {difference, reference.steps[i].step};
  }
  return gap;
}

/// Two subjects' curves without a word of how far roundings move them: a gap that bounds may allow
/// proves nothing.
bool is_unknown(const Curve& reference, const Curve& actual, const CurveBounds& bounds,
                const LossGap& gap) {
  const bool has_bounds = bounds.rtol.has_value() || !reference.spreads.empty();
  if (has_bounds || reference.subject == actual.subject ||
      reference.steps.size() != actual.steps.size())
    return false;
  return std::all_of(actual.steps.begin(), actual.steps.end(),
                     [](const CurveStep& step) { return is_finite(step); }) &&
         gap.size <= bounds.ceiling;
}

/// Two loss curves: the reference's perturbed runs say what is allowed, or --rtol, or nothing is.
int compare_curves(const ParsedOptions& options) {
  if (options.given("output-dir"))
    throw UsageError(
        "--output-dir: two loss curves give one line, and no report.json; leave it out");
  const Curve reference = read_curve(options.get<std::string>("reference")),
              actual = read_curve(options.get<std::string>("actual"));
  if (!options.get<bool>("allow-different-settings")) refuse_different_settings(reference, actual);
  if (options.given("rtol") && !reference.spreads.empty())
    throw UsageError(
        "--rtol: the reference's perturbed runs say what is allowed of a loss curve; leave it out");
  CurveBounds bounds = curve_bounds(actual);
  if (options.given("rtol")) bounds.rtol = options.get<double>("rtol");
  CurveVerdict verdict = judge_curve(reference, actual, bounds);
  const LossGap gap = loss_gap(reference, actual);
  if (verdict.first.has_value() && is_unknown(reference, actual, bounds, gap)) {
    verdict.status = Status::kVacuous;
    verdict.reason = fmt::format(
        "the curves differ, and nothing says how far roundings alone move them: {} has no "
        "perturbed runs. Compare with the "
        "loss_reference.json of isoshard train, or give --rtol. First difference: {}",
        label_of(reference), verdict.reason);
  }
  fmt::print("{}", render(verdict));
  if (verdict.first.has_value() && gap.size > 0)
    fmt::print("          largest difference of the loss: {:.3g} in step {}\n", gap.size, gap.step);
  return exit_code_of(verdict.status);
}

/// A missing file that is named as one is one: reading it says that it is missing.
bool names_a_curve(const std::filesystem::path& path) {
  std::error_code ignored;
  return is_curve_file(path) ||
         (path.extension() == ".json" && !std::filesystem::exists(path, ignored));
}

/// Whether both are given and are loss curves.   Errors   UsageError if one is a curve and the
/// other a bundle.
bool are_curves(const ParsedOptions& options) {
  if (!options.given("reference") || !options.given("actual") || options.given("input-dir"))
    return false;
  const bool first = names_a_curve(options.get<std::string>("reference")),
             second = names_a_curve(options.get<std::string>("actual"));
  if (first != second)
    throw UsageError(
        "compare takes two bundles or two loss curves (loss_SUBJECT.json), not one of each");
  return first;
}

int run(const ParsedOptions& options) {
  check_rtol(options);
  if (are_curves(options)) return compare_curves(options);
  const std::vector<DumpedPair> pairs = pairs_of(options);
  std::filesystem::path output_dir;
  if (options.given("output-dir")) output_dir = options.get<std::string>("output-dir");
  const OutputFolder lock(output_dir, "--output-dir");
  JudgePolicy policy;
  if (options.given("rtol")) policy.rtol = options.get<double>("rtol");
  const bool allow = options.get<bool>("allow-different-settings");
  const DifferentSettings different =
      allow ? DifferentSettings::kAllowed : DifferentSettings::kRefused;
  RenderOptions render_options;
  render_options.color = isatty(STDOUT_FILENO) != 0;
  render_options.all_tensors = options.get<bool>("verbose");
  std::string text;
  nlohmann::json cases = nlohmann::json::array();
  int code = kExitConforms;
  for (const DumpedPair& pair : pairs) {
    const Verdict verdict = compare_bundles(pair.reference, pair.actual, policy, different);
    const std::string part = render(verdict, render_options);
    fmt::print("{}{}", text.empty() ? "" : "\n", part);
    text += (text.empty() ? "" : "\n") + part;
    cases.push_back(verdict_json(verdict));
    code = combine_exit_codes(code, exit_code_of(verdict.status));
  }
  write_reports(output_dir, code, cases, nlohmann::json::array(), text);
  return code;
}

}  // namespace

Command compare_command() {
  return {"compare",
          "judge one dumped run against another",
          "compare REFERENCE ACTUAL [options]   or   compare --input-dir DIR [options]",
          "  isoshard verify --subjects ddp --dp 2 --dtype fp32 --dump runs\n"
          "  isoshard compare runs/reference_* runs/qwen2_dp2\n"
          "  isoshard compare curves/loss_reference.json curves/loss_ddp.json          two loss "
          "curves of isoshard train",
          declare,
          run};
}

}  // namespace isoshard
