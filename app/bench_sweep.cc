// SPDX-License-Identifier: Apache-2.0
/// `isoshard bench sweep` and `isoshard bench plan`: many configurations beside each other.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "app/bench_actions.h"
#include "app/options/bench_options.h"
#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "harness/cli/output.h"
#include "harness/cli/output_folder.h"
#include "harness/cli/progress.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "subjects/model/config/builtin.h"
#include "subjects/registry/subject_spec.h"
#include "suite/bench/bench_json.h"
#include "suite/bench/bench_statistics.h"
#include "suite/bench/bench_text.h"
#include "suite/bench/formulas/fitting.h"
#include "suite/bench/formulas/memory_model.h"

namespace isoshard {
namespace {

using BenchJson = nlohmann::ordered_json;
using FlagList = std::vector<std::string>;

constexpr std::size_t kMostConfigurations = 256;
/// Of what is available, so much may be predicted for all ranks together.
constexpr double kShareOfMemory = 0.9;
constexpr std::size_t kTableWidth = 80;
/// "[ungated] " before each line.
constexpr std::size_t kUngatedMark = 10;

/// What became of a configuration: one vocabulary for plans and sweeps (docs/reference/bench.md).
enum class SweptState : std::uint8_t {
  kFits,            ///< predicted to fit; nothing ran
  kTooLarge,        ///< predicted not to fit; nothing ran
  kMeasured,        ///< fits, conforms and was timed
  kDoesNotConform,  ///< its gate failed, so nothing was timed
  kFailed,          ///< its processes broke down
  kNotRun,          ///< the sweep was interrupted before it
  kNotPossible,     ///< its flags contradict each other, or the model
};
constexpr std::array<std::string_view, 7> kStateNames = {
    "fits", "too large", "measured", "does not conform", "failed", "not run", "not possible"};

std::string_view name_of(SweptState state) {
  return kStateNames.at(static_cast<std::size_t>(state));
}

/// How many configurations came to each state.
class SweptCounts {
 public:
  void add(SweptState state, std::size_t count = 1) {
    counts_.at(static_cast<std::size_t>(state)) += count;
  }
  [[nodiscard]] std::size_t of(SweptState state) const {
    return counts_.at(static_cast<std::size_t>(state));
  }
  /// "8 configurations: 5 fits, 2 too large, 1 not possible".
  [[nodiscard]] std::string in_words() const {
    std::string words;
    std::size_t all = 0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      all += counts_[i];
      if (counts_[i] > 0)
        words += fmt::format("{}{} {}", words.empty() ? "" : ", ", counts_[i], kStateNames.at(i));
    }
    return fmt::format("{} configuration{}: {}", all, all == 1 ? "" : "s", words);
  }

 private:
  std::array<std::size_t, kStateNames.size()> counts_{};
};

struct SweptPlan {
  FlagList flags;  ///< what it has besides the flags of all
  BenchPlan plan;
  RankMemory memory;
};

struct SweepRequest {
  std::vector<SweptPlan> plans;
  std::vector<std::string> refused;  ///< "FLAGS: why"
};

/// "tp=1,2" -> {{"--tp","1"}, {"--tp","2"}}; of switches "recompute=false,true".
std::vector<FlagList> varied(const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    throw UsageError(
        fmt::format("--vary must be a flag and its values, such as tp=1,2, got {}", text));
  const std::string name = "--" + text.substr(0, equals);
  std::vector<FlagList> result;
  std::string_view rest = std::string_view(text).substr(equals + 1);
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string value(rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    if (value == "false") {
      result.emplace_back();
    } else if (value == "true") {
      result.push_back({name});
    } else {
      result.push_back({name, value});
    }
  }
  if (result.empty()) throw UsageError(fmt::format("--vary {}: no value is named", text));
  return result;
}

std::vector<FlagList> crossed(const std::vector<FlagList>& a, const std::vector<FlagList>& b) {
  std::vector<FlagList> result;
  for (const FlagList& first : a) {
    for (const FlagList& second : b) {
      result.push_back(first);
      result.back().insert(result.back().end(), second.begin(), second.end());
    }
  }
  return result;
}

/// Degrees that the processes allow, with what an implementation can spread besides.
std::vector<FlagList> usual_variations(const ParsedOptions& options, bool recomputes) {
  const int ranks = options.given("nproc-per-node") ? options.get<int>("nproc-per-node") : 2;
  std::vector<std::string> impls = bench_impls();
  std::erase(impls, "reference");
  if (options.given("impl")) impls = {options.get<std::string>("impl")};
  std::vector<FlagList> result;
  for (const std::string& impl : impls) {
    const std::string subject = subject_of_impl(impl);
    for (const Degrees& degrees : degrees_of(subject, ranks)) {
      FlagList flags = {
          "--impl", impl, "--dp", std::to_string(degrees.dp), "--tp", std::to_string(degrees.tp)};
      if (degrees.pp > 1) {
        flags.insert(flags.end(), {"--pp", std::to_string(degrees.pp)});
      }
      std::vector<FlagList> more = {{}};
      if (subject_spec(subject).takes("zero_stage"))
        more = {{"--zero-stage", "0"}, {"--zero-stage", "1"}, {"--zero-stage", "2"}};
      if (subject_spec(subject).takes("distributed_optimizer"))
        more = {{}, {"--distributed-optimizer"}};
      if (recomputes) more = crossed(more, {{}, {"--recompute"}});
      for (FlagList& own : crossed({flags}, more)) result.push_back(std::move(own));
    }
  }
  return result;
}

std::string_view flag_name(std::string_view flag) {
  return flag.substr(2);
}

SweepRequest sweep_request_of(const ParsedOptions& options, bool recomputes) {
  std::vector<FlagList> variations = {{}};
  if (options.given("vary")) {
    for (const std::string& text : options.get<std::vector<std::string>>("vary"))
      variations = crossed(variations, varied(text));
  } else {
    variations = usual_variations(options, recomputes);
  }
  if (variations.size() > kMostConfigurations)
    throw UsageError(fmt::format("at most {} configurations are possible, got {}; vary less",
                                 kMostConfigurations, variations.size()));
  const FlagList base = repeating_flags(options);
  SweepRequest request;
  std::set<std::string> known;
  for (const FlagList& variation : variations) {
    std::set<std::string_view> own;
    for (const std::string& word : variation) {
      if (word.starts_with("--")) own.insert(flag_name(word));
    }
    FlagList words = variation;
    bool is_kept = true;
    for (const std::string& word : base) {
      // of a flag that varies, neither name nor value
      if (word.starts_with("--"))
        is_kept = !own.contains(flag_name(word)) && flag_name(word) != "nproc-per-node";
      if (is_kept) words.push_back(word);
    }
    const std::string name = fmt::format("{}", fmt::join(variation, " "));
    try {
      BenchPlan plan = planned_bench_of(parse_bench_flags(words));
      plan.output_dir = options.get<std::string>("output-dir");
      if (!known.insert(plan.impl + plan.item.slug()).second) continue;
      RankMemory memory = largest_of(predicted_memory(plan.item));
      request.plans.push_back({variation, std::move(plan), std::move(memory)});
    } catch (const UsageError& error) {
      request.refused.push_back(fmt::format("{}: {}", name, error.what()));
    }
  }
  if (request.plans.empty())
    throw UsageError(fmt::format("nothing selected: no configuration is possible{}",
                                 request.refused.empty() ? "" : "; " + request.refused.front()));
  return request;
}

std::string name_of_swept(const SweptPlan& swept) {
  return fmt::format("{}", fmt::join(swept.flags, " "));
}

/// A row whose last column are flags, each with its value, on as many lines as they need.
Lines row_of_flags(const std::string& numbers, const FlagList& flags, std::size_t width) {
  Lines lines = {numbers};
  bool is_begun = true;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    std::string word = flags[i];
    if (i + 1 < flags.size() && !flags[i + 1].starts_with("--")) word += " " + flags[++i];
    if (!is_begun && lines.back().size() + 1 + word.size() > width) {
      lines.emplace_back(numbers.size(), ' ');
      is_begun = true;
    }
    lines.back() += (is_begun ? "" : " ") + word;
    is_begun = false;
  }
  return lines;
}

BenchJson memory_json(const RankMemory& memory) {
  return {{"parameters", memory.parameters}, {"masters_and_states", memory.masters},
          {"gradients", memory.gradients},   {"activations", memory.activations},
          {"logits", memory.logits},         {"peak", memory.peak},
          {"moment", memory.moment}};
}

std::string quoted_command(const BenchPlan& plan, const FlagList& changes) {
  FlagList words = plan.arguments;
  for (std::size_t i = 0; i + 1 < changes.size(); i += 2) {
    const auto found = std::ranges::find(words, changes[i]);
    if (found != words.end() && found + 1 != words.end()) {
      *(found + 1) = changes[i + 1];
    } else {
      words.insert(words.end(), {changes[i], changes[i + 1]});
    }
  }
  return fmt::format("isoshard bench {}", fmt::join(words, " "));
}

/// The model with fewer layers or shorter samples, or else a smaller one.
std::string command_that_fits(const BenchPlan& plan, double usable) {
  for (const std::string& name :
       {plan.model_name, std::string("Qwen/Qwen3-0.6B"), std::string("small")}) {
    Case item = plan.item;
    FlagList changes;
    if (name != plan.model_name) {
      item.config = builtin_config(name);
      item.weights_path.clear();
      changes = {"--model", name};
      item.seq_length = std::min(item.seq_length, item.config.max_positions);
    }
    const std::optional<Case> cut = cut_to_fit(item, usable);
    if (!cut.has_value()) continue;
    if (cut->config.num_layers != item.config.num_layers)
      changes.insert(changes.end(), {"--num-layers", std::to_string(cut->config.num_layers)});
    if (cut->seq_length != plan.item.seq_length)
      changes.insert(changes.end(), {"--seq-length", std::to_string(cut->seq_length)});
    try {
      cut->validate();
    } catch (const UsageError&) {
      continue;  // degrees that do not fit this model
    }
    return fmt::format("this fits: {}", quoted_command(plan, changes));
  }
  return "take fewer processes or shorter samples";
}

/// Of the ranks, those that run on this machine.
double share_of_ranks_here(const Case& item) {
  const Peers* const peers = default_launcher().peers();
  if (peers == nullptr || num_processes(item) == 1) return 1;
  const Hosts& hosts = peers->hosts();
  const auto host =
      static_cast<std::size_t>(hosts.host_of.at(static_cast<std::size_t>(peers->index())));
  return std::min(1.0, static_cast<double>(hosts.num_processes.at(host)) / num_processes(item));
}

/// Why it is not run; empty if there is memory for it.
std::string why_too_large(const BenchPlan& plan) {
  try {
    refuse_without_memory(plan);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

void show_refused(const SweepRequest& request, BenchOutput& output, SweptCounts& counts,
                  bool is_gated) {
  for (const std::string& line : request.refused)
    output.show({fmt::format("{}: {}", name_of(SweptState::kNotPossible), line)}, is_gated);
  counts.add(SweptState::kNotPossible, request.refused.size());
}

/// Of a sweep the worst that came up; what did not fit counts where nothing was measured.
std::pair<SweptState, int> end_of(const SweptCounts& counts) {
  for (const SweptState bad :
       {SweptState::kFailed, SweptState::kDoesNotConform, SweptState::kNotRun}) {
    if (counts.of(bad) > 0) return {bad, kExitConforms};  // with the codes of its configurations
  }
  if (counts.of(SweptState::kMeasured) > 0) return {SweptState::kMeasured, kExitConforms};
  return {SweptState::kTooLarge, kExitDiverges};
}

/// A configuration of a sweep, tried.
struct Swept {
  SweptState state = SweptState::kNotRun;
  int code = kExitConforms;
  std::string why;  ///< of what was not measured
  BenchResult result;
};

Swept swept(const BenchPlan& plan) {
  Swept tried;
  if (interrupt_signal() != 0) return tried;
  if (tried.why = why_too_large(plan); !tried.why.empty()) {
    tried.state = SweptState::kTooLarge;
    return tried;
  }
  try {
    tried.result = bench(plan, {});
  } catch (const UsageError& error) {
    tried.state = SweptState::kNotPossible;
    tried.why = error.what();
    return tried;
  } catch (const std::exception& error) {
    if (interrupt_signal() != 0) return tried;
    tried.state = SweptState::kFailed;
    tried.code = exit_code_of(error);
    tried.why = error.what();
    return tried;
  }
  const GateResult& gate = tried.result.gate;
  tried.state =
      gate.state == GateState::kFails ? SweptState::kDoesNotConform : SweptState::kMeasured;
  tried.code = gate.exit_code;
  return tried;
}

}  // namespace

void refuse_without_memory(const BenchPlan& plan) {
  const MachineMemory there = memory_of_machine();
  if (there.bytes <= 0) return;  // not known
  const double needed = predicted_bytes_of_world(plan.item) * share_of_ranks_here(plan.item),
               usable = kShareOfMemory * static_cast<double>(there.available_bytes);
  // processes that run together must decide alike
  const bool is_too_large = needed > usable;
  const std::int64_t lacking = sum_over_peers(default_launcher(), is_too_large ? 1 : 0);
  if (lacking == 0) return;
  if (!is_too_large)
    throw UsageError(fmt::format(
        "{} of {} needs more memory than another host of the job has; take shorter samples, fewer "
        "layers, or fewer ranks on that host",
        plan.impl, plan.model_name));
  const RankMemory largest = largest_of(predicted_memory(plan.item));
  const std::string way_out = command_that_fits(plan, usable);
  throw UsageError(fmt::format(
      "{} of {} needs {:.0f} bytes of memory ({}) for {} {}, up to {} each, but {:.0f} bytes ({}) "
      "are usable here; {}",
      plan.impl, plan.model_name, needed, in_gib(needed), num_processes(plan.item),
      num_processes(plan.item) == 1 ? "process" : "processes", in_gib(largest.peak), usable,
      in_gib(usable), way_out));
}

int bench_memory_plan(const ParsedOptions& options) {
  if (!options.given("memory"))
    throw UsageError("bench plan must be told what a process has: --memory 80GB");
  const double memory = parse_bytes(options.get<std::string>("memory"));
  BenchOutput output(options);
  SweepRequest request = sweep_request_of(options, /*recomputes=*/true);
  std::ranges::sort(request.plans, {}, [](const SweptPlan& s) { return s.memory.peak; });
  output.show({fmt::format("{} a process; the most of a rank, in GiB, predicted", in_gib(memory)),
               fmt::format("{:<9} {:>6} {:>7} {:>6} {:>6} {:>6} {:>6}  {}", "state", "peak",
                           "weights", "states", "grads", "activ.", "logits", "configuration")},
              /*is_gated=*/true);
  SweptCounts counts;
  for (const SweptPlan& s : request.plans) {
    const RankMemory& m = s.memory;
    const SweptState state = m.peak <= memory ? SweptState::kFits : SweptState::kTooLarge;
    counts.add(state);
    const std::string numbers =
        fmt::format("{:<9} {:>6.2f} {:>7.2f} {:>6.2f} {:>6.2f} {:>6.2f} {:>6.2f}  ", name_of(state),
                    m.peak / kBytesPerGb, m.parameters / kBytesPerGb, m.masters / kBytesPerGb,
                    m.gradients / kBytesPerGb, m.activations / kBytesPerGb, m.logits / kBytesPerGb);
    output.show(row_of_flags(numbers, s.flags, kTableWidth), /*is_gated=*/true);
  }
  show_refused(request, output, counts, /*is_gated=*/true);
  output.conclude({counts.in_words()}, /*is_gated=*/true);
  const bool fits = counts.of(SweptState::kFits) > 0;
  return output.finish("plan of " + options.get<std::string>("model"),
                       std::string(name_of(fits ? SweptState::kFits : SweptState::kTooLarge)),
                       fits ? kExitConforms : kExitDiverges);
}

int bench_sweep(const ParsedOptions& options) {
  const SweepRequest request = sweep_request_of(options, /*recomputes=*/false);
  const std::filesystem::path folder_path = options.get<std::string>("output-dir");
  const OutputFolder folder(folder_path, "--output-dir");
  BenchOutput output(options);
  Progress progress(static_cast<int>(request.plans.size()));
  BenchJson rows = BenchJson::array();
  int code = kExitConforms;
  const bool is_gated = request.plans.front().plan.is_gated;
  const std::size_t width = is_gated ? kTableWidth : kTableWidth - kUngatedMark;
  output.show({"predicted and measured: GiB of the rank that holds most",
               fmt::format("{:>9} {:>8} {:>5} {:>9} {:>9}  {}", "predicted", "measured", "ratio",
                           "ms a step", "tokens/s", "configuration")},
              is_gated);
  SweptCounts counts;
  for (const SweptPlan& own : request.plans) {
    const std::string name = name_of_swept(own);
    progress.show(name);
    const Swept tried = swept(own.plan);
    code = combine_exit_codes(code, tried.code);
    counts.add(tried.state);
    BenchJson row = {{"flags", own.flags},
                     {"state", name_of(tried.state)},
                     {"config", bench_config_json(own.plan)},
                     {"predicted", memory_json(own.memory)}};
    Lines lines = {fmt::format("{}: {}{}{}", name_of(tried.state), name,
                               tried.why.empty() ? "" : ": ", tried.why)};
    if (tried.state == SweptState::kMeasured) {
      const BenchSummary s = summary_of(tried.result);
      const double predicted = own.memory.peak / kBytesPerGb;
      lines = row_of_flags(fmt::format("{:>9.4f} {:>8.4f} {:>5.3f} {:>9.3f} {:>9.1f}  ", predicted,
                                       s.peak_gb, predicted / s.peak_gb,
                                       kMillisecondsPerSecond * s.mean_s, s.tokens_per_second),
                           own.flags, width);
      row["measured"] = {{"peak_gb", s.peak_gb},
                         {"avg_step_time_ms", kMillisecondsPerSecond * s.mean_s},
                         {"avg_tokens_per_sec", s.tokens_per_second}};
    }
    if (tried.state == SweptState::kMeasured || tried.state == SweptState::kDoesNotConform)
      row["gate"] = name_of(tried.result.gate.state);
    progress.clear();
    output.show(lines, is_gated);
    rows.push_back(std::move(row));
  }
  show_refused(request, output, counts, is_gated);
  output.conclude({fmt::format("{}; {}", counts.in_words(), (folder_path / "sweep.json").string())},
                  is_gated);
  write_file_atomically(
      folder_path / "sweep.json",
      BenchJson{{"runs", std::move(rows)}, {"machine", machine_json()}}.dump(1) + "\n");
  const auto [state, own_code] = end_of(counts);
  code = combine_exit_codes(code, own_code);
  if (interrupt_signal() != 0) code = 128 + interrupt_signal();
  return output.finish("sweep of " + options.get<std::string>("model"), std::string(name_of(state)),
                       code);
}

}  // namespace isoshard
