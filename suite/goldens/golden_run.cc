// SPDX-License-Identifier: Apache-2.0
// From runs to lines.
#include "suite/goldens/golden_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "core/base/reference_name.h"
#include "fixtures/cases/case_settings.h"
#include "fixtures/cases/presets.h"
#include "fixtures/cases/setting.h"
#include "fixtures/inputs/input_digests.h"
#include "fixtures/oracle/arithmetic_digest.h"
#include "harness/bundle/run_settings.h"
#include "harness/judge/judge.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/machine.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/model.h"
#include "subjects/registry/subject_spec.h"
#include "suite/goldens/step_lines.h"
#include "suite/record/job_rounding.h"
#include "suite/reference/reference.h"
#include "suite/train/judge_training.h"

namespace isoshard {
namespace {

using Texts = std::map<std::string, std::string>;

Texts training_settings(const Case& item) {
  return parse_run_settings(bundle_settings(item, policy_of(item)),
                            "the settings of " + item.slug())
      .training;
}

/// A run of the small model as it is when nothing is said.
Case usual_case() {
  Case item;
  item.config = builtin_config("small");
  item.settings = verify_settings();
  return item;
}

Texts config_of(const Case& item) {
  static const Texts usual = training_settings(usual_case());
  Texts config;
  for (const auto& [name, value] : training_settings(item)) {
    const auto found = usual.find(name);
    if (found == usual.end() || found->second != value) config[name] = value;
  }
  const auto quoted = [](std::string_view text) { return fmt::format("\"{}\"", text); };
  config["subject"] = quoted(item.subject);
  for (const Setting& setting : settings()) {
    if (!setting.golden_value) continue;
    const std::string_view key = setting.golden_key.empty() ? setting.name : setting.golden_key;
    if (std::string value = setting.golden_value(item); !value.empty())
      config[std::string(key)] = std::move(value);
  }
  return config;
}

std::vector<GoldenLine> lines_of(const Curve& curve) {
  std::vector<GoldenLine> lines;
  for (const CurveStep& step : curve.steps) {
    GoldenLine line{fmt::format("step {}", step.step), "", {{"loss", step.loss, 0}}};
    for (std::size_t i = 0; i < step.rank_losses.size(); ++i)
      line.numbers.push_back({fmt::format("loss of dp rank {}", i), step.rank_losses[i], 0});
    line.numbers.push_back({"grad_norm", step.grad_norm, 0});
    line.numbers.push_back({"learning_rate", step.learning_rate, 0});
    lines.push_back(std::move(line));
  }
  return lines;
}

/// What each number of a curve may drift (docs/reference/goldens.md).
void add_drift(std::vector<GoldenLine>& lines, const Curve& reference, const CurveBounds& bounds) {
  CurveSpread envelope;
  const auto widened = [&](double value, double spread, double ceiling) {
    return std::min(std::max(bounds.factor * spread, bounds.relative_floor * std::fabs(value)),
                    ceiling);
  };
  constexpr double kNoCeiling = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < lines.size() && i < reference.spreads.size(); ++i) {
    const CurveSpread& spread = reference.spreads[i];
    envelope = {std::max(envelope.loss, spread.loss),
                std::max(envelope.rank_loss, spread.rank_loss),
                std::max(envelope.grad_norm, spread.grad_norm)};
    for (GoldenNumber& number : lines[i].numbers) {
      if (number.name == "learning_rate") continue;
      if (number.name == "loss") {
        number.drift = widened(number.value, envelope.loss, bounds.ceiling);
      } else {
        number.drift = widened(number.value,
                               number.name == "grad_norm" ? envelope.grad_norm : envelope.rank_loss,
                               kNoCeiling);
      }
    }
  }
}

/// A run of one step with what the judge said of it.
struct StepRun {
  Trace trace;
  Verdict verdict;
};

StepRun run_step_golden(const GoldenSpec& spec, const RunOptions& run, int responses) {
  ReferenceOptions options;
  options.responses = responses;
  const Reference reference = make_reference(spec.item, options);
  RunOptions keeping = run;
  keeping.keep = Keep::kEverything;  // projections are sums over all elements
  StepRun step{run_case(spec.item, reference, keeping), {}};
  step.verdict = judge(reference, step.trace, policy_of(spec.item));
  return step;
}

/// Whether a run agrees with its reference, and in words why not.
GoldenParity curve_parity(const TrainedCase& reference, const TrainedCase& trained) {
  const CurveVerdict verdict = judge_training(reference.curve, trained);
  std::string words = verdict.reason;
  if (!reference.is_sound())
    words = fmt::format("the reference did not end as it should {}; {}",
                        non_finite_in_words(reference), words);
  return {verdict.status == Status::kConforms && reference.is_sound(),
          fmt::format("{} against its reference: {}", trained.curve.subject, words)};
}

void refuse_stale(const GoldenSpec& spec, const Golden& golden, const Golden& identity) {
  const std::string stale = staleness(golden, identity);
  if (stale.empty()) return;
  throw GoldenError(fmt::format(
      "{}: is stale, the golden is of another run:\n  {}\nif that is meant, record it anew: {}",
      spec.name, stale, command_to_create(spec.name)));
}

}  // namespace

Golden golden_identity(const GoldenSpec& spec) {
  const std::uint64_t arithmetic = rounding_of_job(default_launcher()).digest;
  static const std::string cpu = this_machine().cpu;
  Golden golden;
  golden.name = spec.name;
  golden.config = config_of(spec.item);
  golden.weights_sha256 = weights_sha256(spec.item);
  golden.inputs_sha256 = batches_sha256(spec.item);
  golden.fingerprint = {{"libtorch", TORCH_VERSION},
                        {"cpu", cpu},
                        {"backend", "shm"},
                        {"threads", "1"},
                        {"reduction_order", std::string(name_of(spec.item.reduction_order))}};
  golden.arithmetic = digest_text(arithmetic);
  golden.build = build_info();
  golden.recorded = time_now();
  return golden;
}

Golden run_golden(const GoldenSpec& spec, const RunOptions& run) {
  Golden golden = golden_identity(spec);
  if (spec.kind == GoldenKind::kCurve) {
    TrainOptions options;
    options.run = run;
    golden.lines = lines_of(train_case(spec.item, options).curve);
  } else {
    const StepRun step = run_step_golden(spec, run, 0);
    golden.lines = lines_of_step(step.verdict, step.trace);
  }
  return golden;
}

GoldenCheck check_golden(const GoldenStore& store, const GoldenSpec& spec, const RunOptions& run,
                         int steps) {
  Golden golden = store.read(spec.name);
  refuse_stale(spec, golden, golden_identity(spec));
  GoldenSpec first = spec;
  if (spec.kind == GoldenKind::kCurve && steps < spec.item.steps) {
    first.item.steps = steps;
    golden.lines.resize(static_cast<std::size_t>(steps));
  }
  const Golden actual = run_golden(first, run);
  GoldenCheck check{compare_golden(golden, actual), ""};
  const std::size_t index = check.comparison.first.has_value() ? check.comparison.first->index : 0;
  check.text = render(golden, actual, check.comparison, look_further(spec, index));
  return check;
}

const TrainedCase& GoldenRecorder::reference_of_curve(const Case& item) {
  const Case reference = reference_case(item);
  const auto found = references_.find(reference.reference_slug());
  if (found != references_.end()) return found->second;
  return references_.emplace(reference.reference_slug(), train_reference(reference)).first->second;
}

void GoldenRecorder::record_curve(const GoldenSpec& spec, Golden& golden) {
  const bool is_reference = isoshard::is_reference(spec.item.subject);
  TrainOptions faulty, plain;
  faulty.run = run_;
  // A reference that `run_` changes is one of its own: nothing else is judged against it.
  const bool is_shared = !is_reference || !changes_references_;
  TrainedCase own;
  if (!is_shared) own = train_reference(spec.item, kPerturbedRuns, faulty);
  const TrainedCase& reference = is_shared ? reference_of_curve(spec.item) : own;
  Case judged = spec.item;
  if (is_reference) judged.subject = kBaselineName;
  const TrainedCase trained = train_case(judged, is_reference ? plain : faulty);
  const TrainedCase& recorded = is_reference ? reference : trained;
  const CurveBounds bounds = curve_bounds(trained.curve);
  golden.parity = curve_parity(reference, trained);
  golden.drift_rule = fmt::format(
      "{:g} x the largest spread of {} perturbed runs of the reference up to the step, at least "
      "{:g} of the value, of the loss at most "
      "{:g}",
      bounds.factor, reference.curve.perturbed_runs, bounds.relative_floor, bounds.ceiling);
  golden.lines = lines_of(recorded.curve);
  add_drift(golden.lines, reference.curve, bounds);
}

Golden GoldenRecorder::record(const GoldenSpec& spec) {
  Golden golden = golden_identity(spec);
  if (spec.kind == GoldenKind::kCurve) {
    record_curve(spec, golden);
    return golden;
  }
  const StepRun run = run_step_golden(spec, run_, 3);
  golden.lines = lines_of_step(run.verdict, run.trace);
  for (GoldenLine& line : golden.lines) {
    if (line.projections.has_value())
      line.projections = stored(line.projections->values, line.projections->allowed);
  }
  golden.parity = {run.verdict.status == Status::kConforms,
                   fmt::format("against one process: {}", run.verdict.reason)};
  golden.drift_rule = spec.kind == GoldenKind::kLattice
                          ? "none: every value is exactly representable, on every machine"
                          : "the norm of a tensor: what the tensor may be off from its reference, "
                            "its projections 8 times that over all ranks; ids, masks, weights as "
                            "read and the embedding: none";
  return golden;
}

std::string golden_failure(const std::string& name, int steps,
                           const std::filesystem::path& accepted,
                           const std::filesystem::path& pending) {
  const GoldenSpec spec = select_goldens({name}).at(0);
  if (is_recording_goldens()) {
    static GoldenRecorder recorder;  // tests of one program share references
    write_pending(pending, recorder.record(spec));
    return "";
  }
  try {
    const GoldenCheck check = check_golden(GoldenStore(accepted), spec, {}, steps);
    return check.comparison.answer == GoldenAnswer::kRegression ? check.text : "";
  } catch (const GoldenError& error) {
    return error.what();
  }
}

}  // namespace isoshard
