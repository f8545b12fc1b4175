// SPDX-License-Identifier: Apache-2.0
// Control, then test sets, seed by seed.
#include "suite/converge/converge.h"

#include <fmt/format.h>

#include <utility>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "fixtures/cases/device_settings.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/inputs/inputs.h"
#include "fixtures/weights/shared_weights.h"
#include "harness/plot/loss_figure.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/host_pause.h"
#include "harness/world/interrupt.h"
#include "harness/world/machine.h"
#include "suite/converge/converge_presets.h"
#include "suite/faults/fault.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/warm_up_training.h"

namespace isoshard {
namespace {

constexpr std::string_view kBaseline = "ddp";

/// Figures of long runs have so many points a line.
constexpr std::size_t kMostPoints = 500;

/// Every k-th step, and the last one.
Curve thinned(const Curve& curve) {
  Curve thin = curve;
  const std::size_t stride = (curve.steps.size() + kMostPoints - 1) / kMostPoints;
  std::erase_if(thin.steps, [&, last = curve.steps.back().step](const CurveStep& step) {
    return static_cast<std::size_t>(step.step) % stride != 0 && step.step != last;
  });
  thin.spreads.clear();
  return thin;
}

CurveVerdict vacuous(const Curve& curve, std::string reason) {
  CurveVerdict verdict;
  verdict.label = label_of(curve);
  verdict.reason = std::move(reason);
  verdict.steps = static_cast<int>(curve.steps.size());
  return verdict;
}

Case with_seed(Case item, std::uint64_t seed) {
  item.seed = seed;
  return item;
}

Case as_subject(Case item, std::string_view subject) {
  item.subject = subject;
  return item;
}

class Converging {
 public:
  Converging(const ConvergePlan& plan, TrainObserver& observer) : plan_(plan), observer_(observer) {
    result_.report.notes = plan.notes;
    result_.report.environment = settings_in_environment();
    std::vector<Case> cases = {plan.control};
    for (const TestSet& set : plan.sets) cases.push_back(set.item);
    result_.report.environment.merge(device_environment(cases));
    result_.report.environment.merge(collectives_environment(cases));
  }

  void check_control() {
    observer_.on_start("ddp and its perturbed runs, then FSDP, on a small model");
    ReportCurve item{.name = plan_.check.slug()};
    item.remarks.emplace_back("          (the control set, 1D FSDP, against ddp on a small model)");
    run_guarded(item, [&] {
      const PerturbedCase ddp =
          train_perturbed(as_subject(plan_.check, kBaseline), plan_.perturbed_runs, options());
      const TrainedCase fsdp = train_case(plan_.check, options());
      item.verdict = judge_training(ddp.trained.curve, fsdp);
      item.verdict->label = "copy of " + label_of(fsdp.curve);
      item.curve = named(fsdp.curve, "check_fsdp");
      result_.check = *item.verdict;
    });
    if (!item.failure.empty()) result_.check = vacuous(item.curve, item.failure);
    add(std::move(item));
  }

  /// For each seed the control, then every set.
  void train_seed_by_seed() {
    for (std::size_t i = 0; i < plan_.seeds.size() && interrupt_signal() == 0; ++i)
      train_seed(plan_.seeds[i]);
  }

  /// All controls, then every set with its own seeds. Weights are drawn from a seed into a file, as
  /// a seed checkpoint, so that samples stay those of the control's seed.
  void train_over_seeds() {
    for (const std::uint64_t seed : plan_.seeds) {
      if (interrupt_signal() != 0 || !train_control(seed)) return;
    }
    for (std::size_t i = 0; i < plan_.sets.size() && interrupt_signal() == 0; ++i)
      train_set_over_seeds(i);
  }

  ConvergeResult finish() {
    draw();
    if (interrupt_signal() != 0) result_.report.exit_code = 128 + interrupt_signal();
    return std::move(result_);
  }

 private:
  void train_seed(std::uint64_t seed) {
    std::vector<Case> all = {with_seed(plan_.control, seed)};
    for (const TestSet& set : plan_.sets) all.push_back(with_seed(set.item, seed));
    const SharedWeights weights(all);
    if (!train_control(seed)) return;
    for (std::size_t i = 0; i < plan_.sets.size() && interrupt_signal() == 0; ++i)
      train_set(i, seed);
  }

  /// Whether it ended.
  bool train_control(std::uint64_t seed) {
    const Case item = seeded(plan_.control, seed);
    const int perturbed_runs = plan_.test_seeds.empty() ? plan_.perturbed_runs : 0;
    const std::string run = of_seed("control and perturbed runs", seed);
    observer_.on_start(run);
    ReportCurve report{.name = item.slug()};
    ConvergeControl control{.seed = seed};
    run_guarded(report, [&] {
      control.runs = train_perturbed(item, perturbed_runs, options(run));
      const Curve& curve = control.runs.trained.curve;
      keep(named(curve, file_of("control", seed)));
      control.problem = perturbed_runs > 0 ? problem_of_control(control.runs)
                                           : found_without_reference(control.runs.trained);
      if (!control.problem.empty()) report.verdict = vacuous(curve, control.problem);
      report.curve = named(curve, file_of("control", seed));
    });
    const bool has_ended = report.failure.empty();
    add(std::move(report));
    if (has_ended) result_.controls.push_back(std::move(control));
    return has_ended;
  }

  void train_set(std::size_t index, std::uint64_t seed) {
    const TestSet& set = plan_.sets[index];
    const Case item = with_seed(set.item, seed);
    const std::string run = of_seed(set.title, seed);
    observer_.on_start(run);
    ReportCurve report{.name = item.slug(), .fault = plan_.fault};
    ConvergeRun trained{.set = index, .seed = seed};
    run_guarded(report, [&] {
      TrainedCase done = train_test(set, item, seed);
      trained.judged = judge_convergence(result_.controls.back().runs, done,
                                         item.micro_batches == plan_.control.micro_batches);
      trained.judged->verdict.label = run;
      report.verdict = trained.judged->verdict;
      report.curve = trained.curve = std::move(done.curve);
    });
    trained.failure = report.failure;
    result_.runs.push_back(std::move(trained));
    add(std::move(report));
  }

  void train_set_over_seeds(std::size_t index) {
    const TestSet& set = plan_.sets[index];
    std::vector<ReportCurve> reports;
    std::vector<ConvergeRun> runs;
    std::vector<TrainedCase> ended;
    for (const std::uint64_t seed : plan_.test_seeds) {
      const Case item = seeded(set.item, seed);
      observer_.on_start(of_seed(set.title, seed));
      reports.push_back({.name = item.slug(), .fault = plan_.fault});
      runs.push_back({.set = index, .seed = seed});
      run_guarded(reports.back(), [&] {
        TrainedCase done = train_test(set, item, seed);
        reports.back().curve = runs.back().curve = done.curve;
        ended.push_back(std::move(done));
      });
      runs.back().failure = reports.back().failure;
    }
    std::vector<Curve> controls;
    for (const ConvergeControl& control : result_.controls)
      controls.push_back(control.runs.trained.curve);
    std::vector<ConvergenceVerdict> verdicts = judge_over_seeds(controls, ended);
    for (std::size_t i = 0, next = 0; i < runs.size(); ++i) {
      if (runs[i].failure.empty()) {
        runs[i].judged = std::move(verdicts[next++]);
        runs[i].judged->verdict.label = of_seed(set.title, runs[i].seed);
        reports[i].verdict = runs[i].judged->verdict;
      }
      result_.runs.push_back(std::move(runs[i]));
      add(std::move(reports[i]));
    }
  }

  /// The case with the weights of a seed, and the samples of that seed too unless seeds differ.
  Case seeded(const Case& item, std::uint64_t seed) {
    if (plan_.test_seeds.empty()) return with_seed(item, seed);
    const auto path = weights_.path() / fmt::format("seed{}.safetensors", seed);
    if (!std::filesystem::exists(path)) save_initial_weights(with_seed(plan_.control, seed), path);
    Case result = item;
    result.weights_path = path.string();
    return result;
  }

  /// With the plan's fault; its curve is kept in the folder.
  TrainedCase train_test(const TestSet& set, const Case& item, std::uint64_t seed) {
    TrainOptions own = options(of_seed(set.title, seed));
    const FaultProbe probe;
    if (!plan_.fault.empty()) own.run = with_fault(own.run, find_fault(plan_.fault), item, probe);
    TrainedCase trained = train_case(item, own);
    if (!plan_.fault.empty()) require_fired(probe, plan_.fault, item.slug());
    trained.curve = named(std::move(trained.curve), file_of(set.name, seed));
    keep(trained.curve);
    return trained;
  }

  template <class Run>
  void run_guarded(ReportCurve& item, const Run& run) {
    try {
      run();
    } catch (const std::exception& error) {
      set_failure(item, error);
    }
  }

  void add(ReportCurve item) {
    const std::string name = item.name;
    observer_.on_curve(result_.report.add(std::move(item)));
    if (std::string slow = host_pause_in_words(take_host_pauses(), name); !slow.empty()) {
      observer_.on_note(slow);
      result_.report.notes.push_back(std::move(slow));
    }
  }

  TrainOptions options(const std::string& run = {}) {
    TrainOptions options;
    options.check_interval = plan_.check_interval;
    if (!run.empty() && observer_.watches_steps())
      options.on_step = [this, run](int step) { observer_.on_step(run, step); };
    return options;
  }

  /// Files and lines of figures are named by the set: all test sets are of one subject.
  static Curve named(Curve curve, std::string name) {
    curve.subject = std::move(name);
    return curve;
  }

  [[nodiscard]] std::string of_seed(const std::string& words, std::uint64_t seed) const {
    return plan_.has_one_seed() ? words : fmt::format("{}, seed {}", words, seed);
  }
  [[nodiscard]] std::string file_of(const std::string& name, std::uint64_t seed) const {
    return plan_.has_one_seed() ? name : fmt::format("{}_seed{}", name, seed);
  }

  void keep(const Curve& curve) const {
    if (!plan_.folder.empty()) write_curve(plan_.folder / curve_file_name(curve), curve);
  }

  /// One figure a seed: the control is the baseline. Runs with other seeds have no baseline.
  void draw() const {
    if (plan_.folder.empty() || !plan_.test_seeds.empty()) return;
    for (const ConvergeControl& control : result_.controls) {
      std::vector<Curve> curves = {thinned(control.runs.trained.curve)};
      curves.front().title = control_title(plan_.control);
      for (const ConvergeRun& run : result_.runs) {
        if (run.seed != control.seed || run.curve.steps.empty()) continue;
        curves.push_back(thinned(run.curve));
        curves.back().title = plan_.sets[run.set].title;
      }
      const auto path = plan_.folder / (file_of("curves", control.seed) + ".svg");
      write_file_atomically(path, figure_file(path, curves));
    }
  }

  const ConvergePlan& plan_;
  TrainObserver& observer_;
  ConvergeResult result_;
  const ScratchFolder weights_;
};

}  // namespace

ConvergeResult converge(const ConvergePlan& plan, TrainObserver& observer) {
  sweep_scratch_folders();
  warm_up_training({plan.control});
  require_unchanged_inputs();
  Converging run(plan, observer);
  run.check_control();
  if (plan.test_seeds.empty()) {
    run.train_seed_by_seed();
  } else {
    run.train_over_seeds();
  }
  return run.finish();
}

}  // namespace isoshard
