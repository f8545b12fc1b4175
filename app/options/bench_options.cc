// SPDX-License-Identifier: Apache-2.0
// From the tool's flags to a plan.
#include "app/options/bench_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <charconv>
#include <chrono>

#include "app/options/attach_options.h"
#include "app/options/case_options.h"
#include "app/options/setting_options.h"
#include "core/base/error.h"
#include "fixtures/inputs/inputs.h"
#include "harness/cli/report_file.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

/// Flags that are settings elsewhere, and mean something else here, or nothing: predicted memory
/// knows no frozen weights.
constexpr std::string_view kOwnMeaning[] = {"warmup-steps", "autocast", "freeze"};
constexpr const char* kDefaultModel = "Qwen/Qwen3-32B";
constexpr int kMostRepeats = 1000;

Case bench_base_case() {
  Case item;
  item.dtype = Dtype::kBFloat16;
  item.attention = AttentionImpl::kSdpa;
  item.batch_size = 1;
  item.seq_length = 2048;
  item.seed = 42;
  item.steps = 100;
  item.data.kind = DataSource::Kind::kRandomIds;
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  item.settings.optimizer.learning_rate = 1e-5;
  item.settings.optimizer.weight_decay = 0.01;
  return item;
}

void set_dtype(const ParsedOptions& options, Case& item) {
  item.dtype = parse_dtype(options.get<std::string>("dtype"));
  if (options.get<bool>("autocast")) {
    item.settings.autocast = item.dtype;
    item.dtype = Dtype::kFloat32;
  }
  // AdamW's eps is 0 in fp16
  if (item.dtype == Dtype::kFloat16) item.settings.master_dtype = Dtype::kFloat32;
}

/// "auto": what the processes leave beside the other axes.
int tensor_degree(const ParsedOptions& options, int processes, const Degrees& others, bool has_tp) {
  const std::string& text = options.get<std::string>("tp");
  if (text == "auto") {
    if (processes == 0 || !has_tp) return 1;
    const auto taken = static_cast<int>(others.num_ranks());
    if (taken < 1 || processes % taken != 0)
      throw UsageError(fmt::format(
          "--tp-size auto: {} processes must be divisible by {}; change their number or the "
          "degrees",
          processes, describe(others)));
    return processes / taken;
  }
  int degree = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), degree);
  if (error != std::errc() || end != text.data() + text.size())
    throw UsageError(fmt::format("--tp-size must be a number or auto, got {}", text));
  return degree;
}

/// How many there are, or are asked for; 0: as many as the degrees need.
int processes_of(const ParsedOptions& options) {
  const int attached = options.get<bool>("attach") ? ranks_of_job(options) : 0;
  if (!options.given("nproc-per-node")) return attached;
  const int asked = options.get<int>("nproc-per-node");
  if (attached > 0 && asked != attached)
    throw UsageError(fmt::format("--nproc-per-node must be the {} processes of the job, got {}",
                                 attached, asked));
  return asked;
}

void set_degrees(const ParsedOptions& options, Case& item) {
  const SubjectSpec& spec = subject_spec(item.subject);
  const int processes = processes_of(options);
  if (options.given("nproc-per-node") && processes < 1)
    throw UsageError(fmt::format("--nproc-per-node must be at least 1, got {}", processes));
  item.degrees = with_pp_and_cp(options, item.subject, {});
  item.degrees.dp = options.get<int>("dp");
  // the only axis that it has takes all processes
  if (!options.given("dp") && processes > 0 && !spec.has(Axis::kTp) && !spec.is_reference())
    item.degrees.dp = processes;
  item.degrees.tp = tensor_degree(options, processes, item.degrees, spec.has(Axis::kTp));
  if (processes == 0 || spec.is_reference()) return;
  if (item.degrees.num_ranks() != processes)
    throw UsageError(fmt::format(
        "dp_size x tp_size must be the number of processes: {} has {} ranks, {} {}",
        describe(item.degrees), item.degrees.num_ranks(),
        options.given("nproc-per-node") ? "--nproc-per-node is" : "the job has", processes));
}

/// What the tool has where nothing else is said.
void set_defaults_of_impl(Case& item) {
  if (!subject_spec(item.subject).takes("zero_stage")) return;
  item.settings.zero_stage = 1;
  item.settings.make_vocab_size_divisible_by = 1;
}

void set_deadline(const ParsedOptions& options, Case& item) {
  if (!options.given("deadline")) return;
  const auto seconds = options.get<double>("deadline");
  if (!(seconds >= 0.1 && seconds <= 1e6))
    throw UsageError(fmt::format("--deadline must be from 0.1 to 1e6 seconds, got {}", seconds));
  item.deadline =
      std::chrono::milliseconds(static_cast<std::chrono::milliseconds::rep>(1000 * seconds));
}

int at_least(const ParsedOptions& options, const char* name, int least, int most) {
  const int value = options.get<int>(name);
  if (value < least || value > most)
    throw UsageError(fmt::format("--{} must be from {} to {}, got {}", name, least, most, value));
  return value;
}

}  // namespace

std::vector<std::string> repeating_flags(const ParsedOptions& options) {
  constexpr std::string_view kNot[] = {"output-dir", "report", "config", "repeat"};
  OptionTable table;
  declare_bench_options(table);
  std::vector<std::string> flags;
  for (const auto& option : table.options.options()) {
    const std::string& name = option->long_name();
    const bool is_of_this_run = std::ranges::find(kNot, name) != std::end(kNot) ||
                                table.groups[name] == "comparing" || table.groups[name] == "ranks";
    if (!options.given(name) || is_of_this_run) continue;
    const std::string value = value_text(options, name);
    if (value == "false") continue;
    flags.push_back("--" + name);
    if (value != "true") flags.push_back(value);
  }
  return flags;
}

void declare_bench_options(OptionTable& table) {
  table.leading_groups = {"benchmark", "comparing"};
  auto add = table.group("benchmark"), model = table.group("model and mesh");
  add("impl", po::value<std::string>()->default_value("autotp"),
      fmt::format("implementation: {}", fmt::join(bench_impls(), " ")).c_str());
  add("steps", po::value<int>()->default_value(100), "training steps");
  add("warmup-steps", po::value<int>()->default_value(5), "steps that are not counted");
  add("log-interval", po::value<int>()->default_value(10), "print every so many steps; 0: none");
  add("output-dir", po::value<std::string>()->default_value("./results"),
      "write results_IMPL_tpT_dpD.json to this folder (docs/reference/bench.md)");
  add("repeat", po::value<int>()->default_value(1), "runs, each in fresh processes");
  add("threads", po::value<int>()->default_value(0),
      "threads of each rank (default: cores / ranks)");
  add("ungated", po::bool_switch(),
      "time without a verdict on a small twin; every line of output says so");
  model("model", po::value<std::string>()->default_value(kDefaultModel),
        "built-in name, config.json, or Hugging Face folder (its weights are used)");
  model("tp", po::value<std::string>()->default_value("auto"),
        "tensor-parallel degree; auto: --nproc-per-node / dp");
  model("dp", po::value<int>()->default_value(1), "data-parallel degree");
  model("nproc-per-node", po::value<int>(),
        "number of processes: must be pp x dp x cp x tp (default: that)");
  model("dtype", po::value<std::string>()->default_value("bfloat16"),
        "of training: bfloat16 float16 float32 float64");
  model("autocast", po::bool_switch(),
        "fp32 parameters, matrix products in --dtype, as torch.autocast");
  model("deadline", po::value<double>(),
        "seconds without progress of any rank after which the run counts as hung");
  declare_setting_options(table, kOwnMeaning);
  declare_report_file(table);
  declare_attach_options(table);
  for (const auto& [alias, name] : {std::pair{"tp-size", "tp"},
                                    {"dp-size", "dp"},
                                    {"model-name", "model"},
                                    {"num-training-steps", "steps"},
                                    {"num-workers", "nproc-per-node"}})
    table.aliases[alias] = name;
  auto compare = table.group("comparing");
  compare("action", po::value<std::string>(), "what to do: run (default), compare A B");
  compare(
      "sides", po::value<std::vector<std::string>>()->multitoken()->composing(),
      "of compare: results_*.json, or flags without dashes such as \"impl=autotp zero-stage=2\"");
  compare("pairs", po::value<int>()->default_value(5), "of compare: runs of each side, at least 3");
  compare("confidence", po::value<double>()->default_value(0.95, "0.95"),
          "of compare: confidence of the interval");
  compare("allowed-slowdown", po::value<double>()->default_value(0.05, "0.05"),
          "of compare with a single stored run: the relative slowdown that is still accepted");
  table.positional.add("action", 1).add("sides", -1);
}

ParsedOptions parse_bench_flags(const std::vector<std::string>& words) {
  OptionTable table;
  declare_bench_options(table);
  return parse_options(table, words);
}

BenchPlan bench_plan_of(const ParsedOptions& options) {
  BenchPlan plan;
  plan.impl = options.get<std::string>("impl");
  plan.model_name = options.get<std::string>("model");
  std::vector<Case> cases = {bench_base_case()};
  Case& item = cases.front();
  item.subject = subject_of_impl(plan.impl);
  use_model(plan.model_name, /*has_data=*/true, cases);
  item.data.kind = DataSource::Kind::kRandomIds;
  item.steps = at_least(options, "steps", 1, 10'000'000);
  set_dtype(options, item);
  set_degrees(options, item);
  set_defaults_of_impl(item);
  set_deadline(options, item);
  apply_setting_options(options, cases, kOwnMeaning);
  apply_subject_options(options, cases);
  plan.warmup_steps = at_least(options, "warmup-steps", 0, 10'000'000);
  if (plan.warmup_steps >= item.steps)
    throw UsageError(fmt::format("--warmup-steps must be below the {} steps of the run, got {}",
                                 item.steps, plan.warmup_steps));
  plan.log_interval = at_least(options, "log-interval", 0, 10'000'000);
  plan.repeat = at_least(options, "repeat", 1, kMostRepeats);
  plan.is_gated = !options.get<bool>("ungated");
  plan.output_dir = options.get<std::string>("output-dir");
  item.validate();
  plan.threads = at_least(options, "threads", 0, 1024);
  if (plan.threads == 0) plan.threads = usual_threads(item);
  plan.arguments = repeating_flags(options);
  plan.item = item;
  if (!options.get<bool>("attach"))
    refuse_more_than_fork(plan.item,
                          ": start more with mpirun and --attach, or take lower degrees");
  return plan;
}

}  // namespace isoshard
