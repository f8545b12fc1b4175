// SPDX-License-Identifier: Apache-2.0
// Options of `train`: a preset's or a fault's own case, changed
// by every given flag, then one case a subject.
#include "app/options/train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <optional>

#include "app/options/attach_options.h"
#include "app/options/case_options.h"
#include "app/options/setting_options.h"
#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/cases/setting.h"
#include "fixtures/inputs/inputs.h"
#include "harness/cli/output.h"
#include "harness/cli/report_file.h"
#include "subjects/registry/subject_spec.h"
#include "suite/faults/fault.h"
#include "suite/reference/lattice_guard.h"
#include "suite/train/judge_training.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

constexpr int kDefaultSteps = 100, kDefaultTp = 2, kDefaultDp = 2;

bool has_tp_axis(const std::string& subject) {
  return subject_spec(subject).has(Axis::kTp);
}

Case base_case(const ParsedOptions& options, const std::string& fault) {
  if (!fault.empty()) {
    if (options.given("preset"))
      throw UsageError(
          "--fault brings its own case; leave --preset out and change it by other flags");
    return find_fault(fault).smallest_case();
  }
  Case base =
      preset_cases(options.given("preset") ? options.get<std::string>("preset") : "small").front();
  // As the published scripts train: AdamW, clipping at 1.
  base.settings.optimizer = OptimizerSettings{};
  return base;
}

void apply_dtype(const ParsedOptions& options, Case& item) {
  const Strings dtypes = list_option(options, "dtype");
  if (dtypes.size() > 1)
    throw UsageError(fmt::format("--dtype {}: a training run has one dtype; train once for each",
                                 fmt::join(dtypes, ",")));
  if (!dtypes.empty()) item.dtype = parse_dtype(dtypes.front());
  // the only one that autocast takes
  if (dtypes.empty() && options.given("autocast")) item.dtype = Dtype::kFloat32;
}

/// Switching to SGD without a rate means SGD's usual one, for which the bounds are known to hold; a
/// lattice model keeps what makes it exact.
void apply_optimizer(const ParsedOptions& options, const std::string& fault, Case& item) {
  TrainSettings& settings = item.settings;
  if (!fault.empty() || is_lattice(item) || !options.given("optimizer") ||
      settings.optimizer.kind != OptimizerSettings::Kind::kSgd)
    return;
  const OptimizerSettings usual = verify_settings().optimizer;
  if (!options.given("learning-rate"))
    settings.optimizer.learning_rate = std::min(usual.learning_rate, largest_rate(item));
  settings.optimizer.momentum = usual.momentum;
}

Strings subjects_of(const ParsedOptions& options, const Case& base, const std::string& fault) {
  Strings selected = subjects_option(options);
  if (selected.empty() && !fault.empty()) return {base.subject};
  if (selected.empty()) {
    for (const SubjectSpec& spec : subject_specs()) {
      if (!spec.is_reference()) selected.emplace_back(spec.name);
    }
  }
  for (const std::string& subject : selected) (void)subject_spec(subject);
  for (auto it = selected.begin(); it != selected.end(); ++it) {
    if (std::find(selected.begin(), it, *it) != it)
      throw UsageError(fmt::format("--subjects must name each subject once, got {} twice", *it));
  }
  return selected;
}

/// ddp has no tp axis; of ddp alone --num-workers is the dp degree, as in the published scripts.
void apply_degrees(const ParsedOptions& options, const Strings& selected, const std::string& fault,
                   Case& base) {
  const bool any_tp = std::any_of(selected.begin(), selected.end(), has_tp_axis);
  if (options.given("tp") && options.get<int>("tp") > 1 && !any_tp)
    throw UsageError(fmt::format("--tp {}: {} {} no tp axis; leave --tp out or add --subjects {}",
                                 options.get<int>("tp"), fmt::join(selected, " and "),
                                 selected.size() == 1 ? "has" : "have",
                                 subjects_with(Axis::kTp).front()));
  const int workers = options.given("num-workers") ? options.get<int>("num-workers") : 0;
  if (fault.empty() || options.given("tp"))
    base.degrees.tp = options.given("tp") ? options.get<int>("tp") : any_tp ? kDefaultTp : 1;
  if (fault.empty() || options.given("dp"))
    base.degrees.dp = options.given("dp") ? options.get<int>("dp") : kDefaultDp;
  if (!options.given("dp") && workers > 0 && !any_tp) base.degrees.dp = workers;
  Degrees own = base.degrees;
  if (!any_tp) own.tp = 1;
  for (const std::string& subject : selected) own = with_pp_and_cp(options, subject, own);
  if (workers != 0 && workers != own.num_ranks())
    throw UsageError(
        fmt::format("--num-workers {}: {} has {} ranks; give that number, or leave it out", workers,
                    describe(own), own.num_ranks()));
}

/// At most so many steps as the epochs have.
void apply_epochs(const ParsedOptions& options, Case& base) {
  if (!options.given("num-epochs")) return;
  const int epochs = options.get<int>("num-epochs");
  if (epochs < 1) throw UsageError(fmt::format("--num-epochs must be at least 1, got {}", epochs));
  // refused with the numbers later
  if (base.degrees.dp < 1 || base.batch_size < 1 || base.micro_batches < 1) return;
  const std::optional<std::int64_t> samples = samples_per_epoch(base);
  if (!samples.has_value()) {
    if (options.given("steps")) return;
    throw UsageError(
        "--num-epochs: random ids have no end, so there is no epoch; say how many --steps");
  }
  const std::int64_t a_step = std::int64_t{base.degrees.dp} * base.batch_size * base.micro_batches;
  const std::int64_t most = *samples * epochs / a_step;
  if (most < 1)
    throw UsageError(fmt::format("--num-epochs {}: {} samples do not fill one step of {} samples",
                                 epochs, *samples, a_step));
  if (!options.given("steps") || base.steps > most)
    base.steps = static_cast<int>(std::min<std::int64_t>(most, 1'000'000));
}

std::vector<Case> cases_of(const Strings& selected, const Case& base) {
  std::vector<Case> cases;
  for (const std::string& subject : selected) {
    if (is_reference(subject)) continue;
    Case item = base;
    item.subject = subject;
    if (!has_tp_axis(subject)) item.degrees.tp = 1;
    cases.push_back(std::move(item));
  }
  return cases;
}

/// One reference judges all runs: where a subject always has masters (megatron with 16-bit
/// parameters), all train with them.
void share_precision(TrainRequest& request, Case& base) {
  for (const Case& item : request.cases) {
    if (!item.settings.master_dtype.has_value() ||
        item.settings.master_dtype == base.settings.master_dtype)
      continue;
    base.settings.master_dtype = item.settings.master_dtype;
    request.notes.push_back(fmt::format("{} has {} masters, so all runs have them", item.subject,
                                        name_of(*item.settings.master_dtype)));
  }
  if (request.cases.empty()) return;
  const Case& first = request.cases.front();
  for (Case& item : request.cases) {
    item.settings.master_dtype = base.settings.master_dtype;
    const bool has_other_output = item.settings.output_dtype != first.settings.output_dtype;
    if (!has_other_output && item.rounds_reductions() == first.rounds_reductions()) continue;
    const std::string taker =
        subjects_that_take(has_other_output ? "output_dtype" : "reduce_dtype").front();
    throw UsageError(fmt::format(
        "--{}: one reference judges all runs, and only {} {}; take --subjects {},{}",
        has_other_output ? "output-dtype" : "reduce-dtype", taker,
        has_other_output ? "has an output dtype" : "rounds its gradients to average them",
        reference_subject().name, taker));
  }
  base.settings.output_dtype = first.settings.output_dtype;
  if (first.rounds_reductions()) base.settings.reduce_dtype = first.settings.reduce_dtype;
}

/// What decides the reference, from whatever origin, as flags of verify.
Strings flags_for_verify(const ParsedOptions& options, const Case& base, const std::string& fault) {
  Strings flags;
  const auto add = [&](const std::string& name, const std::string& value) {
    flags.push_back("--" + name);
    const bool is_plain =
        value.find_first_not_of(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./-+,:") ==
        std::string::npos;
    if (value == "true") return;
    std::string quoted;
    for (const char c : value) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    flags.push_back(is_plain && !value.empty() ? value : fmt::format("'{}'", quoted));
  };
  if (!fault.empty()) {
    add("fault", fault);
    if (options.given("dtype")) add("dtype", std::string(name_of(base.dtype)));
  } else {
    add("preset", options.given("preset") ? options.get<std::string>("preset") : "small");
    add("dtype", std::string(name_of(base.dtype)));
    add("optimizer", std::string(name_of(base.settings.optimizer.kind)));
    add("learning-rate", fmt::format("{}", base.settings.optimizer.learning_rate));
  }
  // Fewer steps of verify are the first ones of this run.
  if (base.settings.schedule.kind != LearningRateSettings::Kind::kConstant)
    add("total-steps", fmt::format("{}", base.learning_rate_schedule().total_steps));
  if (base.settings.master_dtype.has_value())
    add("master-dtype", std::string(name_of(*base.settings.master_dtype)));
  OptionTable table;
  declare_case_options(table);
  for (const auto& option : table.options.options()) {
    const std::string& name = option->long_name();
    const bool is_set = std::any_of(flags.begin(), flags.end(),
                                    [&](const std::string& flag) { return flag == "--" + name; });
    const bool is_other =
        name == "tp" || name == "dp" || name == "num-workers" || name.starts_with("save-");
    if (options.given(name) && !is_set && !is_other && value_text(options, name) != "false")
      add(name, value_text(options, name));
  }
  return flags;
}

/// A folder of checkpoints; a relative one lies below --storage-path, if that is given.
std::filesystem::path stored(const ParsedOptions& options, const std::string& option) {
  const std::filesystem::path folder = options.get<std::string>(option);
  if (!options.given("storage-path")) return folder;
  return std::filesystem::path(options.get<std::string>("storage-path")) / folder;
}

void apply_checkpoints(const ParsedOptions& options, TrainRequest& request) {
  std::vector<Case*> all = {&request.reference};
  for (Case& item : request.cases) all.push_back(&item);
  if (options.given("resume")) {
    for (Case* item : all) *item = resumed_case(*item, stored(options, "resume").string());
  }
  if (options.given("save-after") && !options.given("save-checkpoint"))
    throw UsageError(fmt::format("--save-after {}: say where to, with --save-checkpoint DIR",
                                 options.get<int>("save-after")));
  if (!options.given("save-checkpoint")) return;
  for (Case* item : all) {
    item->save_path = (stored(options, "save-checkpoint") / item->subject).string();
    item->save_after = options.given("save-after") ? options.get<int>("save-after") : item->steps;
  }
}

}  // namespace

void declare_train_options(OptionTable& table) {
  const auto list = [] { return po::value<Strings>()->multitoken()->composing(); };
  table.leading_groups = {"runs", "judging", "checkpoints", "output"};
  auto add = table.group("runs"), judging = table.group("judging"),
       checkpoints = table.group("checkpoints"), output = table.group("output");
  add("preset", po::value<std::string>(),
      "where to start from: small (default), default, published; see verify");
  add("subjects", list(),
      "what to train: ddp autotp ... (default: all); the reference is trained anyway, to judge "
      "them");
  add("dtype", list(), "fp32 bf16 fp16 fp64 (default: the preset's)");
  add("steps", po::value<int>(), "training steps (default: 100)");
  add("num-epochs", po::value<int>(), "the most passes over the samples");
  judging(
      "reference", po::value<std::string>()->default_value("run"),
      "run (train it and its perturbed runs), none (nothing is judged), or the loss_reference.json "
      "of an earlier run");
  judging("perturbed-runs", po::value<int>()->default_value(kPerturbedRuns),
          "runs of the reference with weights one ulp away: the bounds are made of them");
  judging("check-interval", po::value<int>()->default_value(10),
          "steps between two comparisons of the copies that ranks hold");
  output("log-interval", po::value<int>()->default_value(0),
         "print the losses every N steps; 0: never");
  judging("fault", po::value<std::string>(),
          "inject a fault of the catalog (isoshard list faults): the run must then exit with 1");
  checkpoints("resume", po::value<std::string>(),
              "resume from this checkpoint (any mesh, any subject); --steps is the step at which "
              "the runs end");
  checkpoints("save-checkpoint", po::value<std::string>(),
              "write a checkpoint of each run to DIR/SUBJECT (docs/reference/checkpoints.md)");
  checkpoints("save-after", po::value<int>(),
              "steps done when it is written; 0: before the first (default: the last)");
  output(
      "output-dir", po::value<std::string>(),
      "write loss_SUBJECT.json of every run, report.json, report.txt and junit.xml to this folder");
  output("storage-path", po::value<std::string>(),
         "the folder below which a relative --save-checkpoint and --resume lie");
  declare_report_file(table);
  declare_case_options(table);
  declare_attach_options(table);
  table.aliases["loss-output-dir"] = "output-dir";
}

TrainRequest train_request_of(const ParsedOptions& options) {
  TrainRequest request;
  if (options.given("fault")) request.fault = find_fault(options.get<std::string>("fault")).id;
  request.inputs = input_files_of(options);
  std::vector<Case> base = {base_case(options, request.fault)};
  base.front().steps = kDefaultSteps;
  apply_case_options(options, request.inputs, base);
  Case& item = base.front();
  apply_dtype(options, item);
  apply_optimizer(options, request.fault, item);
  const Strings selected = subjects_of(options, item, request.fault);
  apply_degrees(options, selected, request.fault, item);
  apply_epochs(options, item);
  request.cases = cases_of(selected, item);
  apply_subject_options(options, request.cases);
  share_precision(request, item);
  request.reference = reference_case(item);
  apply_checkpoints(options, request);
  std::vector<Case> all = request.cases;
  all.push_back(request.reference);
  require_usable(all, Recorded::kNumbers);

  const auto& reference = options.get<std::string>("reference");
  request.runs_reference = reference == "run";
  if (reference != "run" && request.cases.empty())
    throw UsageError(fmt::format("--reference {}: nothing is left to train", reference));
  if (reference != "run" && reference != "none") request.reference_curve = reference;
  request.perturbed_runs = options.get<int>("perturbed-runs");
  request.check_interval = options.get<int>("check-interval");
  request.log_interval = options.get<int>("log-interval");
  if (request.perturbed_runs < 1 || request.perturbed_runs > 100)
    throw UsageError(fmt::format(
        "--perturbed-runs must be from 1 to 100, got {}; for none give --reference none",
        request.perturbed_runs));
  if (request.check_interval < 1)
    throw UsageError(
        fmt::format("--check-interval must be at least 1, got {}", request.check_interval));
  if (request.log_interval < 0)
    throw UsageError(
        fmt::format("--log-interval must be at least 0, got {}", request.log_interval));
  if (options.given("output-dir")) request.output_dir = options.get<std::string>("output-dir");
  if (options.given("storage-path") && !options.given("save-checkpoint") &&
      !options.given("resume"))
    request.notes.push_back(
        "--storage-path is not used: no checkpoint is written; add --save-checkpoint NAME");
  if (const std::string range = outside_range(item); !range.empty())
    request.notes.push_back("WARNING: " + range);
  request.verify_flags = flags_for_verify(options, item, request.fault);
  return request;
}

std::string look_further(const TrainRequest& request, const Case& item, int steps) {
  const bool has_tp = has_tp_axis(item.subject);
  return fmt::format("{} verify --subjects {}{} --dp {} --steps {} {}", started_as("isoshard"),
                     item.subject, has_tp ? fmt::format(" --tp {}", item.degrees.tp) : "",
                     item.degrees.dp, steps, fmt::join(request.verify_flags, " "));
}

}  // namespace isoshard
