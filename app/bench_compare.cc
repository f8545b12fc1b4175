// SPDX-License-Identifier: Apache-2.0
/// `isoshard bench compare`: pairs of runs, or a stored run against runs of now.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "app/bench_actions.h"
#include "app/options/bench_options.h"
#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/progress.h"
#include "harness/verdict/exit_code.h"
#include "suite/bench/bench_json.h"
#include "suite/bench/bench_text.h"
#include "suite/bench/formulas/flops.h"
#include "suite/bench/paired.h"

namespace isoshard {
namespace {

using BenchJson = nlohmann::ordered_json;

constexpr double kMicroseconds = 1e6;
/// A machine whose products are so much slower than then says nothing about a program.
constexpr double kSlowerMachine = 0.9;

struct ComparedSide {
  BenchPlan plan;
  BenchJson stored;  ///< of a file; null for flags
};

/// "impl=autotp zero-stage=2 recompute": flags without their dashes, as the command line would take
/// a text that begins with them for an option of its own.
std::vector<std::string> words_in(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;)
    words.push_back(word.starts_with("--") ? word : "--" + word);
  return words;
}

/// What is asked for beside the sides holds for both: it takes the place of a side's own flag.
std::vector<std::string> overridden(const std::vector<std::string>& own,
                                    const std::vector<std::string>& asked) {
  std::vector<std::string> words = asked;
  bool is_kept = true;
  for (const std::string& word : own) {
    if (word.starts_with("--")) is_kept = std::ranges::find(asked, word) == asked.end();
    if (is_kept) words.push_back(word);
  }
  return words;
}

/// Reads a stored result by `read`.
/// Errors   FileError for JSON of another kind.
template <class Read>
void read_stored(const std::string& path, const Read& read) {
  try {
    read();
  } catch (const nlohmann::json::exception& error) {
    throw FileError(fmt::format("{}: must be a result of isoshard bench: {}", path, error.what()));
  }
}

ComparedSide compared_side(const std::string& text, const ParsedOptions& options) {
  ComparedSide side;
  std::vector<std::string> words;
  if (text.ends_with(".json")) {
    side.stored = read_json_file(text);
    read_stored(text, [&] {
      words = side.stored.at("config").at("arguments").get<std::vector<std::string>>();
    });
  } else {
    words = words_in(text);
  }
  side.plan = bench_plan_of(parse_bench_flags(
      overridden(repeating_flags(parse_bench_flags(words)), repeating_flags(options))));
  side.plan.output_dir = options.get<std::string>("output-dir");
  refuse_without_memory(side.plan);
  return side;
}

double compared_confidence(const ParsedOptions& options) {
  const double confidence = options.get<double>("confidence");
  if (!(confidence >= 0.5 && confidence < 1))
    throw UsageError(fmt::format("--confidence must be from 0.5 to below 1, got {}", confidence));
  return confidence;
}

BenchJson interval_json(const RatioInterval& interval) {
  return {{"ratio", interval.ratio},
          {"low", interval.low},
          {"high", interval.high},
          {"confidence", interval.confidence},
          {"verdict", name_of(interval.verdict())}};
}

Lines runs_table(const PairedRuns& runs) {
  Lines lines = {"us a token (median step of each run)",
                 fmt::format("  {:>5} {:>12} {:>12} {:>8}", "pair", "A", "B", "B / A")};
  for (std::size_t i = 0; i < runs.a.size(); ++i)
    lines.push_back(fmt::format("  {:>5} {:>12.3f} {:>12.3f} {:>8.4f}", i + 1,
                                kMicroseconds * runs.a[i], kMicroseconds * runs.b[i],
                                runs.b[i] / runs.a[i]));
  return lines;
}

std::string interval_in_words(const RatioInterval& interval) {
  return fmt::format("time of B / time of A: {:.4f}, {:g} % interval {:.4f} to {:.4f}",
                     interval.ratio, 100 * interval.confidence, interval.low, interval.high);
}

int compare_pairs(const ComparedSide& a, const ComparedSide& b, const ParsedOptions& options) {
  const int pairs = options.get<int>("pairs");
  const double confidence = compared_confidence(options);
  if (pairs < kFewestPairs || pairs > 1000)
    throw UsageError(fmt::format("--pairs must be from {} to 1000, got {}", kFewestPairs, pairs));
  const std::filesystem::path folder_path = options.get<std::string>("output-dir");
  const OutputFolder folder(folder_path, "--output-dir");
  BenchOutput output(options);
  const std::string title = fmt::format("{} against {}", a.plan.impl, b.plan.impl);
  const bool is_gated = a.plan.is_gated && b.plan.is_gated;
  output.show({fmt::format("A: {} {}", a.plan.impl, a.plan.item.slug()),
               fmt::format("B: {} {}", b.plan.impl, b.plan.item.slug())},
              is_gated);
  Progress progress(2 * pairs);
  BenchListener listener;
  listener.on_start = [&](const std::string& what) { progress.show(what); };
  listener.on_gate = [&](const GateResult& gate) {
    progress.clear();
    output.show(gate_lines(gate), is_gated);
  };
  const PairedRuns runs = run_pairs(a.plan, b.plan, pairs, listener, {});
  progress.clear();
  for (const GateResult* const gate : {&runs.gate_a, &runs.gate_b})
    if (gate->state == GateState::kFails) return output.finish_at_gate(title, *gate);
  const RatioInterval interval = ratio_of_pairs(runs.a, runs.b, confidence);
  output.show(runs_table(runs), is_gated);
  output.conclude({interval_in_words(interval),
                   interval.verdict() == PairedVerdict::kNotTold
                       ? std::string("A and B are not told apart: more --pairs narrow the interval")
                       : fmt::format("B is {} than A", name_of(interval.verdict()))},
                  is_gated);
  const BenchJson result = {{"a", bench_config_json(a.plan)},
                            {"b", bench_config_json(b.plan)},
                            {"seconds_per_token_a", runs.a},
                            {"seconds_per_token_b", runs.b},
                            {"b_over_a", interval_json(interval)},
                            {"gated", is_gated},
                            {"machine", machine_json()}};
  write_file_atomically(folder_path / "compare.json", result.dump(1) + "\n");
  return output.finish(title, "measured", kExitConforms);
}

/// The runs of a stored result, in seconds a token.
std::vector<double> stored_runs(const ComparedSide& side, const std::string& path) {
  std::vector<double> seconds;
  read_stored(path, [&] {
    for (const BenchJson& run : side.stored.at("runs"))
      seconds.push_back(run.at("p50_step_time_ms").get<double>() / 1000 /
                        tokens_per_step(side.plan.item));
    const BenchJson now = machine_json();
    for (const char* const key : {"cpu", "cpu_features", "cores"}) {
      if (side.stored.at("machine").at(key) != now.at(key))
        throw UsageError(fmt::format("{}: must be a run of this machine, but its {} is {}, not {}",
                                     path, key, side.stored["machine"][key].dump(),
                                     now.at(key).dump()));
    }
  });
  if (seconds.size() < static_cast<std::size_t>(kFewestPairs))
    throw UsageError(
        fmt::format("{}: must hold at least {} runs to be compared with, got {}; store it with "
                    "--repeat {}",
                    path, kFewestPairs, seconds.size(), kFewestPairs));
  return seconds;
}

int compare_with_stored(const ComparedSide& side, const std::string& path,
                        const ParsedOptions& options) {
  const double allowed = options.get<double>("allowed-slowdown"),
               confidence = compared_confidence(options);
  if (!(allowed >= 0 && allowed < 10))
    throw UsageError(fmt::format("--allowed-slowdown must be from 0 to 10, got {}", allowed));
  const std::vector<double> then = stored_runs(side, path);
  BenchOutput output(options);
  BenchPlan plan = side.plan;
  plan.repeat = std::max(kFewestPairs, options.get<int>("pairs"));
  Progress progress(1 + plan.repeat);
  BenchListener listener;
  listener.on_start = [&](const std::string& what) { progress.show(what); };
  const BenchResult result = bench(plan, listener);
  progress.clear();
  const std::string name = plan.item.slug();
  output.show(gate_lines(result.gate), plan.is_gated);
  if (result.gate.state == GateState::kFails) return output.finish_at_gate(name, result.gate);
  std::vector<double> now;
  for (const BenchRun& run : result.runs) now.push_back(seconds_per_token(run, plan.item));
  const RatioInterval interval = ratio_of_samples(then, now, confidence);
  const double ceiling = result.ceiling.flops_per_second /
                         side.stored["machine"].value("gemm_ceiling_flops_per_sec", 0.0);
  output.show({fmt::format("A: {} ({} runs); B: {} runs of now; products reach {:.0f} % of then",
                           path, then.size(), now.size(), 100 * ceiling),
               interval_in_words(interval)},
              plan.is_gated);
  const bool is_slower = interval.low > 1 + allowed;
  if (is_slower && ceiling < kSlowerMachine) {
    output.conclude({"the machine itself is slower than then, so this says nothing: run it again"},
                    plan.is_gated);
    return output.finish(name, "unclear", kExitInfrastructure);
  }
  output.conclude(
      {is_slower ? fmt::format("REGRESSION: slower by more than the {:g} % allowed", 100 * allowed)
                 : fmt::format("no regression beyond {:g} % is shown", 100 * allowed)},
      plan.is_gated);
  return is_slower ? output.finish(name, "regression", kExitDiverges)
                   : output.finish(name, "measured", kExitConforms);
}

}  // namespace

int bench_compare(const ParsedOptions& options) {
  const std::vector<std::string> sides = options.given("sides")
                                             ? options.get<std::vector<std::string>>("sides")
                                             : std::vector<std::string>();
  if (sides.empty() || sides.size() > 2)
    throw UsageError(fmt::format(
        "bench compare must get two sides, or one stored result to find a regression, got {}",
        sides.size()));
  const ComparedSide a = compared_side(sides[0], options);
  if (sides.size() == 2) return compare_pairs(a, compared_side(sides[1], options), options);
  if (a.stored.is_null())
    throw UsageError("bench compare with one side needs a stored result (results_*.json)");
  return compare_with_stored(a, sides[0], options);
}

}  // namespace isoshard
