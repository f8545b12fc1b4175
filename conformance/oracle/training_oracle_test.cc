// SPDX-License-Identifier: Apache-2.0
// Contract oracle.training: ten steps of our trainer give the numbers of PyTorch's own loop, its
// optimizers, schedules, clipping and loss scaling (fixtures/oracle/make_training_oracle.py).
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"
#include "fixtures/oracle/oracle.h"
#include "fixtures/oracle/oracle_files.h"
#include "fixtures/oracle/training_runs.h"
#include "subjects/checkpoint/file_weights.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/optim/clip.h"
#include "subjects/optim/wrapped_optimizer.h"
#include "subjects/train/parts.h"

namespace isoshard {
namespace {

const StoredRuns& stored_runs() {
  static const StoredRuns runs = read_stored_runs(ISOSHARD_ORACLE_DIR);
  return runs;
}

/// A change to our side of a run; none: as stored.
struct RunChange {
  std::function<void(TrainerConfig&)> config = {};
  std::function<void(TrainerParts&)> parts = {};
};

/// What our trainer gave.
struct OwnRun {
  std::vector<std::map<std::string, double>> steps;
  std::map<std::pair<int, std::string>, NamedTensors> states;  ///< as StoredRun::states
  NamedTensors start;                                          ///< the initial parameters
};

/// Keeps scalars of every step, and the last parameters, masters and moments.
class Recorder final : public Sink {
 public:
  explicit Recorder(const std::vector<ParameterSpec>& specs) : specs_(&specs) {}
  void begin_step(int step) override { scalars_.resize(static_cast<std::size_t>(step) + 1); }
  [[nodiscard]] at::Tensor on_activation(const Site& /*site*/, at::Tensor value) override {
    return value;
  }
  [[nodiscard]] at::Tensor on_activation_grad(const Site& /*site*/, at::Tensor gradient) override {
    return gradient;
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    if (site.kind == RecordKind::kScalar && value.numel() == 1)
      scalars_.back()[site.name] = value.item<double>();
    if (site.kind == RecordKind::kParam || site.kind == RecordKind::kOptimizer)
      latest_[site.name] = value.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  }

  [[nodiscard]] const std::vector<std::map<std::string, double>>& scalars() const {
    return scalars_;
  }
  /// The tensors of one kind; none if there are not those of all parameters.
  [[nodiscard]] NamedTensors latest(const std::string& suffix) const {
    NamedTensors tensors;
    for (const ParameterSpec& spec : *specs_) {
      const auto found = latest_.find(spec.name + suffix);
      if (found != latest_.end()) tensors.emplace(spec.name, found->second);
    }
    return tensors;
  }

 private:
  const std::vector<ParameterSpec>* specs_;
  std::vector<std::map<std::string, double>> scalars_ =
      std::vector<std::map<std::string, double>>(1);
  NamedTensors latest_;
};

/// The micro-batches of a step, as the script has them.
std::vector<TokenBatch> batches_of(const StoredRun& run, std::int64_t step) {
  const StoredRuns& stored = stored_runs();
  const std::int64_t num_steps = stored.ids_NBS.size(0), samples = stored.ids_NBS.size(1);
  std::vector<TokenBatch> batches;
  for (std::int64_t m = 0; m < run.micro_batches; ++m) {
    const at::Tensor ids = stored.ids_NBS[(step + m) % num_steps];
    TokenBatch batch{ids, run.micro_batches == 1 ? ids : stored.labels_NMBS[step][m], {}};
    for (std::int64_t b = 0; b < samples; ++b) batch.sample_ids.push_back(m * samples + b);
    batches.push_back(std::move(batch));
  }
  return batches;
}

NamedTensors changes_since(const NamedTensors& start, const NamedTensors& now) {
  NamedTensors changes;
  for (const auto& [name, tensor] : now) changes.emplace(name, tensor - start.at(name));
  return changes;
}

OwnRun train(const StoredRun& run, const RunChange& change = {}) {
  TrainerConfig config;
  config.model = detail::read_oracle_config(stored_runs().model_folder);
  config.dtype = run.dtype;
  config.settings = run.settings;
  const std::vector<ParameterSpec> specs = make_model(config.model, config.attention)->parameters();
  config.weights =
      std::make_shared<FileWeights>(stored_runs().model_folder / "model.safetensors", specs);
  if (change.config) change.config(config);
  OwnRun own;
  ThreadWorld world(1);
  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 1}}), comm);
    Recorder recorder(specs);
    TrainerParts parts = plain_parts(config, mesh, 1);
    if (change.parts) change.parts(parts);
    Trainer trainer(std::move(parts), mesh, &recorder);
    trainer.setup();
    const NamedTensors start = recorder.latest("");
    for (std::size_t i = 0; i < run.steps.size(); ++i) {
      trainer.train_step(batches_of(run, static_cast<std::int64_t>(i)));
      const int done = static_cast<int>(i) + 1;
      if (!run.states.contains({done, "parameters"})) continue;
      own.states[{done, "parameters"}] = changes_since(start, recorder.latest(""));
      own.states[{done, "masters"}] = changes_since(start, recorder.latest(".master"));
      for (const char* const kind : {"exp_avg", "exp_avg_sq", "momentum_buffer"})
        own.states[{done, kind}] = recorder.latest(std::string(".") + kind);
    }
    own.steps = recorder.scalars();
    own.start = start;
  });
  return own;
}

double unit_of(const StoredRun& run) {
  return run.dtype == Dtype::kFloat64 ? 0x1p-53 : 0x1p-24;
}

/// How far from the stored number ours may be: `response` is what one ulp of all weights moves it
/// by, `elements` how many elements it has (docs/internals/tolerances.md, the perturbed level).
double bound_of(const StoredRun& run, double response, std::int64_t elements) {
  const Dtype coarsest = run.settings.autocast.value_or(run.dtype);
  const bool is_16_bit = size_of(coarsest) < 4;
  const double s = run.dtype == Dtype::kFloat64 ? 6 : 2;
  return std::max((is_16_bit ? 3 : 6.4) * response,
                  unit_of(run) * (4 + s / std::sqrt(static_cast<double>(elements))));
}

/// What a sum rounds to in a step may be the next number in every element: an ulp of the parameter,
/// relative to its change. Weights that are moved by one ulp do not show it, as their sums round
/// alike.
double rounding_of_change(const StoredRun& run, int steps_done, const at::Tensor& start,
                          double change) {
  return change == 0 ? 0 : 2 * unit_of(run) * steps_done * start.norm().item<double>() / change;
}

/// The root mean square of kProjections projections is more than twice what it estimates in one of
/// 10^4 cases.
constexpr double kOfProjections = 2;

/// The run of the same settings in fp64, and moments that have the first step's gradients.
struct WideTwin {
  const char *run, *twin, *kind;
};
constexpr std::array kWideTwins{WideTwin{"autocast", "sgd", "momentum_buffer"},
                                WideTwin{"masters", "adamw", "exp_avg"}};

/// A run in 16 bits must be as far from fp64 as torch's own, so neither wider nor coarser: the
/// geometric mean over all gradients of the first step of the two distances' ratio is at most a
/// factor 2. One bit of the significand more is a factor 2, fp32 is one of 10^4.
void compare_distances(OracleReport& report, const StoredRun& run, const OwnRun& own) {
  const auto* const pair = std::ranges::find(kWideTwins, run.name, &WideTwin::run);
  if (pair == kWideTwins.end()) return;
  const std::pair<int, std::string> key{1, pair->kind};
  const at::Tensor stored = run.states.at(key).sketch_PK,
                   wide = stored_runs().run(pair->twin).states.at(key).sketch_PK;
  double sum = 0;
  const std::vector<std::string>& names = stored_runs().parameters;
  for (std::size_t p = 0; p < names.size(); ++p) {
    const auto row = static_cast<std::int64_t>(p);
    const at::Tensor ours = sketch_of(own.states.at(key).at(names[p]));
    sum += std::log2(sketched_error(wide[row], ours) / sketched_error(wide[row], stored[row]));
  }
  report.rows.push_back({"distance from fp64", "all, in powers of 2",
                         std::abs(sum / static_cast<double>(names.size())), 1});
}

OracleReport compare(const StoredRun& run, const OwnRun& own) {
  OracleReport report{run.name, {}};
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    const StoredRun::Step& step = run.steps[i];
    const auto number = [&](const char* name) {
      const auto found = own.steps.at(i).find(name);
      return found == own.steps.at(i).end() ? std::nan("") : found->second;
    };
    const auto add = [&](const char* claim, double error, double bound) {
      report.rows.push_back({claim, fmt::format("step {}", i), error, bound});
    };
    const bool is_scaled = run.settings.loss_scale.is_on();
    add("learning rate", relative_error(step.learning_rate, number("learning_rate")), 0x1p-51);
    if (is_scaled) {
      add("loss scale", relative_error(step.loss_scale, number("loss_scale")), 0);
      add("skipped", std::abs(number("found_inf") - step.skipped), 0);
    }
    add("loss", relative_error(step.loss, number("loss")), bound_of(run, step.moved_loss, 1));
    if (step.skipped == 0) {
      add("gradient norm", relative_error(step.grad_norm, number("grad_norm")),
          bound_of(run, step.moved_grad_norm, 1));
    } else {
      add("gradient norm", std::isfinite(number("grad_norm")) ? 1 : 0, 0);
    }
  }
  const std::vector<std::string>& names = stored_runs().parameters;
  for (const auto& [key, tensors] : own.states) {
    const std::string claim = fmt::format("{} after {}", key.second, key.first);
    const auto stored = run.states.find(key);
    if (stored == run.states.end()) {
      if (!tensors.empty()) report.rows.push_back({claim, "is not there in torch", 1, 0});
      continue;
    }
    for (std::size_t p = 0; p < names.size(); ++p) {
      const auto found = tensors.find(names[p]);
      const auto row = static_cast<std::int64_t>(p);
      const at::Tensor reference = stored->second.sketch_PK[row];
      const double response = stored->second.moved_P[row].item<double>();
      if (found == tensors.end()) {
        report.rows.push_back({claim, names[p], std::nan(""), 0});
        continue;
      }
      double bound = kOfProjections * bound_of(run, response, found->second.numel());
      if (key.second == "parameters" || key.second == "masters") {
        bound = std::max(bound, rounding_of_change(run, key.first, own.start.at(names[p]),
                                                   reference[0].item<double>()));
      }
      report.rows.push_back(
          {claim, names[p], sketched_error(reference, sketch_of(found->second)), bound});
    }
  }
  compare_distances(report, run, own);
  return report;
}

std::vector<std::string> run_names() {
  std::vector<std::string> names;
  for (const StoredRun& run : stored_runs().runs) names.push_back(run.name);
  return names;
}

/// How near each claim comes to its bound.
std::map<std::string, double> nearest_of(const OracleReport& report) {
  std::map<std::string, double> nearest;
  for (const OracleRow& row : report.rows) {
    if (row.bound > 0) nearest[row.claim] = std::max(nearest[row.claim], row.error / row.bound);
  }
  return nearest;
}

class OracleRuns : public testing::TestWithParam<std::string> {};

TEST_P(OracleRuns, AreThoseOfPyTorchsOwnLoop) {
  const StoredRun& run = stored_runs().run(GetParam());

  const OracleReport report = compare(run, train(run));

  EXPECT_TRUE(report.ok()) << render(report);
  for (const auto& [claim, ratio] : nearest_of(report))
    RecordProperty(claim, fmt::format("{:.2f} of its bound", ratio));
}

INSTANTIATE_TEST_SUITE_P(Settings, OracleRuns, testing::ValuesIn(run_names()),
                         [](const auto& tested) { return tested.param; });

// ---- the comparison fails when it must

/// Leaves vectors out of the weight decay, as recipes with two groups of parameters do. Torch's
/// optimizers themselves decay every parameter that they are given.
class VectorsDoNotDecay final : public WrappedOptimizer {
 public:
  VectorsDoNotDecay(std::unique_ptr<Optimizer> inner, const OptimizerSettings& settings)
      : WrappedOptimizer(std::move(inner)),
        factor_(1 - settings.learning_rate * settings.weight_decay) {}
  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    for (auto& [name, parameter] : parameters) {
      if (parameter.dim() == 1) parameter.div_(factor_);
    }
    inner().step(parameters, gradients);
  }

 private:
  double factor_;
};

/// Adds the decay to the gradient, as Adam without W does.
class CoupledDecay final : public WrappedOptimizer {
 public:
  CoupledDecay(std::unique_ptr<Optimizer> inner, double decay)
      : WrappedOptimizer(std::move(inner)), decay_(decay) {}
  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    NamedTensors coupled;
    for (const auto& [name, gradient] : gradients)
      coupled.emplace(name, gradient + decay_ * parameters.at(name));
    inner().step(parameters, coupled);
  }

 private:
  double decay_;
};

/// Clips to max / norm, without torch's 1e-6 in the denominator.
class ClipsWithoutEps final : public WrappedOptimizer {
 public:
  ClipsWithoutEps(std::unique_ptr<Optimizer> inner, double max_norm)
      : WrappedOptimizer(std::move(inner)), max_norm_(max_norm) {}
  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    NamedTensors clipped = gradients;
    scale_gradients(clipped, max_norm_ / std::sqrt(sum_of_squares(gradients)));
    inner().step(parameters, clipped);
  }

 private:
  double max_norm_;
};

/// Forgets the tied embedding, whose gradient is the largest.
class NormWithoutEmbedding final : public GradNorm {
 public:
  [[nodiscard]] double norm(const NamedTensors& gradients) override {
    NamedTensors others = gradients;
    others.erase("model.embed_tokens.weight");
    return std::sqrt(sum_of_squares(others));
  }
};

/// The rate of another step.
class ShiftedRate final : public LearningRate {
 public:
  ShiftedRate(const StoredRun& run, std::int64_t shift)
      : LearningRate(run.settings.optimizer.learning_rate, run.settings.schedule), shift_(shift) {}
  [[nodiscard]] double at(std::int64_t step) const override {
    return LearningRate::at(std::max<std::int64_t>(0, step + shift_));
  }

 private:
  std::int64_t shift_;
};

/// Only the last micro-batch is left.
class ClearsEachTime final : public Schedule {
 public:
  [[nodiscard]] bool clears_gradients_before(const MicroBatchPlace& /*place*/) override {
    return true;
  }
};

class NeverFinds final : public GradScaler {
 public:
  using GradScaler::GradScaler;
  [[nodiscard]] bool found_on_any_rank(bool /*own*/) override { return false; }
};

/// Something wrong in one run, and a claim that it must break.
struct WrongRun {
  const char* slug;
  const char* run;
  const char* claim;
  RunChange change;
};

void PrintTo(const WrongRun& wrong, std::ostream* out) {
  *out << wrong.slug;
}

template <class Edit>
RunChange in_settings(Edit edit) {
  return {.config = [edit](TrainerConfig& config) { edit(config.settings); }};
}

template <class Edit>
RunChange in_parts(Edit edit) {
  return {.parts = edit};
}

std::vector<WrongRun> wrong_runs() {
  const auto shifted = [](const char* run, std::int64_t shift) {
    return in_parts([=](TrainerParts& parts) {
      parts.learning_rate = std::make_unique<ShiftedRate>(stored_runs().run(run), shift);
    });
  };
  const auto set = [](auto edit) { return in_settings(edit); };
  return {
      {"smaller_momentum", "sgd", "momentum_buffer after 10",
       set([](TrainSettings& s) { s.optimizer.momentum = 0.8; })},
      {"eps_before_bias_correction", "adamw", "parameters after 1",
       set([](TrainSettings& s) { s.optimizer.eps /= std::sqrt(1 - s.optimizer.beta2); })},
      {"other_beta2", "adamw", "exp_avg_sq after 1",
       set([](TrainSettings& s) { s.optimizer.beta2 = 0.999; })},
      {"other_beta2_in_fp32", "adamw_fp32", "exp_avg_sq after 1",
       set([](TrainSettings& s) { s.optimizer.beta2 = 0.951; })},
      {"mean_of_means", "accumulation", "loss", in_parts([](TrainerParts& parts) {
         parts.loss_normalizer = std::make_unique<GroupTokenMean>(2);
       })},
      {"last_micro_batch_only", "accumulation", "gradient norm",
       in_parts([](TrainerParts& parts) { parts.schedule = std::make_unique<ClearsEachTime>(); })},
      {"no_masters", "masters", "parameters after 10",
       set([](TrainSettings& s) { s.master_dtype.reset(); })},
      {"one_step_late", "cosine", "learning rate", shifted("cosine", -1)},
      {"warm_up_from_one", "linear", "learning rate", shifted("linear", 1)},
      {"no_floor", "cosine_floor", "learning rate",
       set([](TrainSettings& s) { s.schedule.min_rate = 0; })},
      {"warm_up_on_top_of_the_total", "cosine_floor", "learning rate",
       set([](TrainSettings& s) { s.schedule.total_steps += s.schedule.warmup_steps; })},
      {"vectors_do_not_decay", "decay_adamw", "parameters after 1",
       in_parts([](TrainerParts& parts) {
         parts.optimizer = std::make_unique<VectorsDoNotDecay>(
             std::move(parts.optimizer), stored_runs().run("decay_adamw").settings.optimizer);
       })},
      {"decay_in_the_gradient",
       "decay_adamw",
       "exp_avg after 1",
       {.config = [](TrainerConfig& c) { c.settings.optimizer.weight_decay = 0; },
        .parts =
            [](TrainerParts& parts) {
              parts.optimizer = std::make_unique<CoupledDecay>(std::move(parts.optimizer), 0.1);
            }}},
      {"no_decay", "decay_sgd", "momentum_buffer after 1",
       set([](TrainSettings& s) { s.optimizer.weight_decay = 0; })},
      {"clips_without_eps", "clip", "momentum_buffer after 1", in_parts([](TrainerParts& parts) {
         parts.optimizer = std::make_unique<ClipsWithoutEps>(std::move(parts.optimizer), 0.5);
       })},
      {"norm_without_the_tied_weight", "clip", "gradient norm", in_parts([](TrainerParts& parts) {
         parts.grad_norm = std::make_unique<NormWithoutEmbedding>();
       })},
      {"no_clipping", "clip_adamw", "exp_avg after 1",
       set([](TrainSettings& s) { s.max_grad_norm = 0; })},
      {"smoothing_over_all_entries", "smoothing", "loss",
       set([](TrainSettings& s) { s.label_smoothing *= 255.0 / 256; })},
      {"grows_one_step_late", "scaler", "loss scale",
       set([](TrainSettings& s) { ++s.loss_scale.growth_interval; })},
      {"grows_once_more", "scaler", "loss scale",
       set([](TrainSettings& s) { s.loss_scale.growth_factor = 1.6; })},
      {"overflow_is_stepped", "overflow", "parameters after 1", in_parts([](TrainerParts& parts) {
         static ThreadWorld alone(1);
         static const std::unique_ptr<Communicator> world = alone.communicator(0);
         parts.grad_scaler = std::make_unique<NeverFinds>(
             stored_runs().run("overflow").settings.loss_scale, *world);
         parts.learning_rate = std::make_unique<LearningRate>(1e-3, LearningRateSettings{});
       })},
      {"rate_waits_for_the_first_step", "overflow", "learning rate", shifted("overflow", -1)},
      {"not_under_autocast", "autocast", "distance from fp64",
       set([](TrainSettings& s) { s.autocast.reset(); })},
      {"autocast_to_fp16", "autocast", "distance from fp64",
       set([](TrainSettings& s) { s.autocast = Dtype::kFloat16; })},
  };
}

class OracleRunsControl : public testing::TestWithParam<WrongRun> {};

TEST_P(OracleRunsControl, IsOutsideOfTheBounds) {
  const WrongRun& wrong = GetParam();
  const StoredRun& run = stored_runs().run(wrong.run);

  const OracleReport report = compare(run, train(run, wrong.change));

  EXPECT_TRUE(std::ranges::any_of(report.rows, [&](const OracleRow& row) {
    return row.claim == wrong.claim && !row.ok();
  })) << render(report);
}

INSTANTIATE_TEST_SUITE_P(Wrong, OracleRunsControl, testing::ValuesIn(wrong_runs()),
                         [](const auto& tested) { return std::string(tested.param.slug); });

TEST(OracleRunsControls, EveryRunHasOne) {
  const std::vector<WrongRun> wrong = wrong_runs();
  for (const std::string& name : run_names())
    EXPECT_TRUE(std::ranges::any_of(wrong, [&](const WrongRun& w) { return w.run == name; }))
        << name;
}

TEST(OracleRunsControls, ARunThatIsMissingIsNamed) {
  EXPECT_THAT([] { (void)stored_runs().run("none"); },
              testing::ThrowsMessage<FileError>(testing::HasSubstr("must have the run none")));
}

}  // namespace
}  // namespace isoshard
