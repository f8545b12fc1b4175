// SPDX-License-Identifier: Apache-2.0
// Options of `converge`: a preset's control, changed by every given flag, and one case a test set.
#include "app/options/converge_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <charconv>

#include "app/options/attach_options.h"
#include "app/options/case_options.h"
#include "app/options/setting_options.h"
#include "app/options/torchtitan_config.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/cli/report_file.h"
#include "suite/converge/converge_presets.h"
#include "suite/faults/fault.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

constexpr std::int64_t kBaseGlobalBatch = 64;  // of the guideline's config

std::vector<std::uint64_t> seeds_of(const ParsedOptions& options, const std::string& name) {
  std::vector<std::uint64_t> seeds;
  for (const std::string& word : list_option(options, name)) {
    std::uint64_t seed = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), seed);
    if (error != std::errc() || end != word.data() + word.size())
      throw UsageError(
          fmt::format("--{} must be whole numbers of at least 0, got '{}'", name, word));
    if (std::ranges::count(seeds, seed) != 0)
      throw UsageError(fmt::format("--{} must name each seed once, got {} twice", name, seed));
    seeds.push_back(seed);
  }
  return seeds;
}

void take_seeds(const ParsedOptions& options, ConvergePlan& plan) {
  plan.seeds = seeds_of(options, "seeds");
  plan.test_seeds = seeds_of(options, "test-seeds");
  if (!plan.seeds.empty() && options.given("seed"))
    throw UsageError("--seed and --seeds say the same; give --seeds alone");
  if (plan.seeds.empty()) plan.seeds = {plan.control.seed};
  plan.control.seed = plan.seeds.front();
  if (!plan.control.weights_path.empty() && (plan.seeds.size() > 1 || !plan.test_seeds.empty()))
    throw UsageError(
        "--seeds must be one seed with --init-weights: from a seed checkpoint all runs start "
        "alike");
  if (plan.test_seeds.empty()) return;
  if (plan.seeds.size() < kLeastSeeds)
    throw UsageError(
        fmt::format("--test-seeds need at least {} --seeds of the control, whose spread is what is "
                    "allowed, got "
                    "{}",
                    kLeastSeeds, plan.seeds.size()));
  for (const std::uint64_t seed : plan.test_seeds) {
    if (std::ranges::count(plan.seeds, seed) != 0)
      throw UsageError(
          fmt::format("--test-seeds must differ from --seeds, got {} in both; leave --test-seeds "
                      "out to compare runs of the same seed",
                      seed));
  }
}

/// A flag holds for all runs. The control must not have the parallelism of a test set.
void refuse_flags_of_sets(const ParsedOptions& options) {
  for (const std::string_view flag : {"tp", "pp", "cp", "micro-batches", "num-workers"}) {
    if (options.given(std::string(flag)))
      throw UsageError(fmt::format(
          "--{} is of a test set, and must not be given to all runs; say it in --test, as in "
          "--test tp=2,pp=2",
          flag));
  }
  Case control;
  control.subject = kControlSubject;
  for (const Setting& setting : settings()) {
    const std::string flag(setting.flag.name);
    if (!is_technique(setting) || !options.given(flag)) continue;
    if (setting.flag.kind == FlagKind::kSwitch && !options.get<bool>(flag)) continue;
    // Part of a trusted training config: of control and test sets.
    if (flag == "reduce-dtype" || flag == "reduction-order") continue;
    throw UsageError(fmt::format(
        "rule technique-control: --{0} is a technique, which the control, 1D FSDP, must not have; "
        "say it in --test, as in --test tp=2,{0}{1}",
        flag, setting.flag.kind == FlagKind::kSwitch ? "" : "=..."));
  }
}

Case control_of(const ParsedOptions& options, const ConvergePreset& preset,
                const InputFiles& inputs) {
  std::vector<Case> base = {preset_control(preset)};
  apply_case_options(options, inputs, base);
  apply_subject_options(options, base);
  Case& control = base.front();
  if (options.given("dp")) control.degrees.dp = options.get<int>("dp");
  const Strings dtypes = list_option(options, "dtype");
  if (dtypes.size() > 1)
    throw UsageError(fmt::format("--dtype must be one dtype, got {}", fmt::join(dtypes, ",")));
  if (!dtypes.empty()) control.dtype = parse_dtype(dtypes.front());
  LearningRateSettings& schedule = control.settings.schedule;
  if (!options.given("warmup-steps"))  // the share that the preset has
    schedule.warmup_steps = schedule.warmup_steps * control.steps / preset_control(preset).steps;
  return control;
}

std::vector<TestSet> sets_of(const std::vector<std::string>& tests, const Case& control) {
  std::vector<TestSet> sets;
  for (const std::string& text : tests) {
    TestSet set = test_set(text, control);
    if (std::ranges::count(sets, set.name, &TestSet::name) != 0)
      throw UsageError(fmt::format("--test must name each set once, got {} twice", set.title));
    sets.push_back(std::move(set));
  }
  return sets;
}

/// The scaled-down model has a layer for each stage of the longest pipeline. Whether it grew.
bool fill_stages(ConvergePlan& plan) {
  std::int64_t stages = 0;
  for (const TestSet& set : plan.sets)
    stages = std::max<std::int64_t>(
        stages, std::int64_t{set.item.degrees.pp} * set.item.settings.nd.stages_per_rank);
  if (stages <= plan.control.config.num_layers) return false;
  use_scaled_llama3(plan.control, stages);
  return true;
}

/// Of a training config of torchtitan: what it says and nothing here listens to.
void note_unused_keys(const ParsedOptions& options, ConvergePlan& plan) {
  if (!options.given("config")) return;
  const auto& path = options.get<std::string>("config");
  if (!path.ends_with(".toml")) return;
  for (const std::string& key : torchtitan_config(path).unused)
    plan.notes.push_back(fmt::format("{}: not used: {}", path, key));
}

void scale_rate(const ParsedOptions& options, ConvergePlan& plan, RuleInputs& inputs) {
  Case& control = plan.control;
  inputs.scaling = parse_rate_scaling(options.get<std::string>("scale-lr"));
  inputs.base_rate = control.settings.optimizer.learning_rate;
  inputs.base_global_batch = options.get<std::int64_t>("base-global-batch");
  if (inputs.base_global_batch < 1)
    throw UsageError(
        fmt::format("--base-global-batch must be at least 1, got {}", inputs.base_global_batch));
  control.settings.optimizer.learning_rate =
      scaled_rate(inputs.base_rate, inputs.scaling, control.degrees.dp * control.batch_size,
                  inputs.base_global_batch);
}

void require_all_usable(const ConvergePlan& plan, bool attaches) {
  const auto refuse_too_many = [&](const Case& item) {
    if (attaches) return;
    refuse_more_than_fork(
        item, fmt::format(": start more with mpirun -n {} and --attach", item.world_size()));
  };
  for (const Case& item : {plan.control, plan.check}) {
    refuse_too_many(item);
    require_usable({item}, Recorded::kNumbers);
  }
  for (const TestSet& set : plan.sets) {
    try {
      refuse_too_many(set.item);
      require_usable({set.item}, Recorded::kNumbers);
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("--test {}: {}", set.text, error.what()));
    }
  }
}

void check_fault(const ParsedOptions& options, ConvergePlan& plan) {
  if (!options.given("fault")) return;
  const Fault& fault = find_fault(options.get<std::string>("fault"));
  if (std::ranges::count(fault.subjects, kTestSubject) == 0)
    throw UsageError(
        fmt::format("--fault must be one that can be put on {}, got {}, which is of {}",
                    kTestSubject, fault.id, join_names(fault.subjects)));
  plan.fault = fault.id;
}

void check_numbers(const ParsedOptions& options, ConvergePlan& plan) {
  plan.perturbed_runs = options.get<int>("perturbed-runs");
  plan.check_interval = options.get<int>("check-interval");
  if (plan.perturbed_runs < 1 || plan.perturbed_runs > 100)
    throw UsageError(
        fmt::format("--perturbed-runs must be from 1 to 100, got {}", plan.perturbed_runs));
  if (plan.check_interval < 1)
    throw UsageError(
        fmt::format("--check-interval must be at least 1, got {}", plan.check_interval));
}

}  // namespace

void declare_converge_options(OptionTable& table) {
  const auto list = [] { return po::value<Strings>()->multitoken()->composing(); };
  table.leading_groups = {"control and test sets", "judging", "output"};
  auto sets = table.group("control and test sets"), judging = table.group("judging"),
       output = table.group("output");
  std::vector<std::string> presets;
  for (const ConvergePreset& preset : converge_presets()) presets.emplace_back(preset.name);
  sets("preset", po::value<std::string>(),
       fmt::format("{} (default: table; with --test: fsdp)", join_names(presets)).c_str());
  sets(
      "test", list(),
      fmt::format("a test set, such as tp=2,pp=2,cp=2: degrees and techniques that the control, 1D "
                  "FSDP on dp ranks, lacks; may be given several times. Techniques: {}",
                  join_names(technique_names()))
          .c_str());
  sets("seeds", list(), "random seeds; each has a control of its own (default: 0)");
  sets("test-seeds", list(),
       "other random seeds for the weights of test sets, on the controls' samples: runs are then "
       "compared over seeds, with at least 3 --seeds");
  sets("steps", po::value<int>(), "training steps (default: 100)");
  sets("dtype", list(), "fp32 (default) bf16 fp16 fp64");
  sets("scale-lr", po::value<std::string>()->default_value("none"),
       "how the rate follows the global batch: none, linear, sqrt");
  sets("base-global-batch", po::value<std::int64_t>()->default_value(kBaseGlobalBatch),
       "samples a step for which the rate is given, with --scale-lr");
  judging("perturbed-runs", po::value<int>()->default_value(kPerturbedRuns),
          "runs of the control with weights one ulp away: the bounds are made of them");
  judging("check-interval", po::value<int>()->default_value(10),
          "steps between two comparisons of the copies that ranks hold");
  judging("fault", po::value<std::string>(),
          "inject a fault of the catalog into the test sets: they must then diverge");
  output("output-dir", po::value<std::string>(),
         "write converge.json, converge.txt, loss_*.json, curves.svg and the reports to this "
         "folder");
  declare_report_file(table);
  declare_case_options(table);
  declare_attach_options(table);
  table.aliases["local-batch-size"] = "batch-size";
  table.toml_options = [](const std::string& path) { return torchtitan_config(path).options; };
}

void fit_to_job(const ParsedOptions& options, ConvergePlan& plan) {
  const int num_ranks = ranks_of_job(options);
  if (num_ranks == 0) return;
  for (const Case& item : {plan.control, plan.check}) {
    if (item.world_size() <= num_ranks) continue;
    throw UsageError(
        fmt::format("the control set {} needs {} ranks, and the attached world has {}; start it "
                    "with mpirun -n {}",
                    item.slug(), item.world_size(), num_ranks, item.world_size()));
  }
  int most = 0;
  std::erase_if(plan.sets, [&](const TestSet& set) {
    most = std::max(most, set.item.world_size());
    if (set.item.world_size() <= num_ranks) return false;
    plan.notes.push_back(
        fmt::format("skipped --test {}: it needs {} ranks, and the attached world has {}", set.text,
                    set.item.world_size(), num_ranks));
    return true;
  });
  if (plan.sets.empty() && most > 0) {
    throw UsageError(
        fmt::format("nothing selected: every test set needs more than the {} ranks of the attached "
                    "world; start it with mpirun -n {}",
                    num_ranks, most));
  }
}

ConvergeRequest converge_request_of(const ParsedOptions& options) {
  ConvergeRequest request;
  ConvergePlan& plan = request.plan;
  request.inputs = input_files_of(options);
  refuse_flags_of_sets(options);
  const bool has_tests = options.given("test");
  const ConvergePreset& preset =
      find_converge_preset(options.given("preset") ? options.get<std::string>("preset")
                           : has_tests             ? "fsdp"
                                                   : "table");
  plan.control = control_of(options, preset, request.inputs);
  take_seeds(options, plan);
  RuleInputs inputs;
  inputs.seeds = plan.seeds;
  inputs.test_seeds = plan.test_seeds;
  scale_rate(options, plan, inputs);
  plan.check = small_check(plan.control);
  std::vector<std::string> tests = preset.tests;
  if (has_tests) {
    for (const std::string& text : options.get<Strings>("test")) tests.push_back(text);
  }
  plan.sets = sets_of(tests, plan.control);
  if (!options.given("model") && !options.given("num-layers") && fill_stages(plan))
    plan.sets = sets_of(tests, plan.control);
  check_numbers(options, plan);
  check_fault(options, plan);
  if (options.given("output-dir")) plan.folder = options.get<std::string>("output-dir");
  require_all_usable(plan, options.get<bool>("attach"));
  inputs.control = plan.control;
  plan.rules = check_rules(inputs, plan.sets);
  require_rules(plan.rules);
  note_unused_keys(options, plan);
  if (const std::string range = outside_range(plan.control); !range.empty())
    plan.notes.push_back("WARNING: " + range);
  return request;
}

}  // namespace isoshard
