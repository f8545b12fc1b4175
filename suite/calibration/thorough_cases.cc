// SPDX-License-Identifier: Apache-2.0
// Draws around the preset thorough.
#include "suite/calibration/thorough_cases.h"

#include <fmt/format.h>

#include <span>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "fixtures/cases/draws.h"
#include "fixtures/cases/presets.h"
#include "fixtures/inputs/inputs.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/registry/subject_spec.h"
#include "suite/calibration/clean_cases.h"

namespace isoshard {
namespace {

using Optimizer = OptimizerSettings::Kind;
using Schedule = LearningRateSettings::Kind;

constexpr int kMostRanks = 8;
constexpr int kMostAttempts = 1000;
constexpr std::int64_t kMostBytes = 128;  // vocabulary that the project's text fits in

bool has_setting(const Case& c, std::string_view setting) {
  return subject_spec(c.subject).takes(setting);
}

void draw_degrees(Draws& draws, Case& c) {
  const SubjectSpec& subject = subject_spec(c.subject);
  const Degrees before = c.degrees;
  do {
    c.degrees = before;
    if (draws.one_in(2)) c.degrees.dp = static_cast<int>(draws.between(1, 3));
    if (subject.has(Axis::kTp) && draws.one_in(2))
      c.degrees.tp = static_cast<int>(draws.between(1, 4));
    if (subject.has(Axis::kCp) && c.degrees.pp == 1 && draws.one_in(3))
      c.degrees.cp = static_cast<int>(draws.between(1, 3));
  } while (c.world_size() == 1 || c.world_size() > kMostRanks);
  c.settings.nd.dp_replicate =
      c.degrees.dp % 2 == 0 && draws.one_in(4) && has_setting(c, "dp_replicate") ? 2 : 1;
}

void draw_heads(Draws& draws, ModelConfig& config, int tp) {
  // gpt2 and Megatron's GPT have a key and a value for each query, and as many numbers as heads
  // hold
  const bool is_plain = config.model_type == "gpt2" || config.model_type == "megatron_gpt";
  draw_head_counts(draws, config, tp, is_plain);
  config.head_dim = 2 * draws.between(2, 6);
  config.hidden_size = is_plain ? config.num_heads * config.head_dim
                                : 4 * draws.between(3, 14) + draws.between(0, 1);
}

void draw_sizes(Draws& draws, Case& c) {
  ModelConfig& config = c.config;
  if (draws.one_in(2)) {
    draw_heads(draws, config, c.degrees.tp);
    config.intermediate_size = c.degrees.tp * draws.between(6, 30);
    config.vocab_size = c.data.kind == DataSource::Kind::kText ? kMostBytes + draws.between(0, 9)
                                                               : draws.between(17, 131);
    // gradients of more bytes than ranks of one machine hand over at once
    if (c.data.kind != DataSource::Kind::kText && draws.one_in(12))
      config.vocab_size = draws.between(6000, 8000);
  }
  if (c.degrees.pp == 1 && draws.one_in(3)) config.num_layers = draws.between(1, 3);
  c.model_name = fmt::format("random-{}", config.model_type);
}

void draw_run(Draws& draws, Case& c) {
  c.seed = static_cast<std::uint64_t>(draws.between(0, 1'000'000));
  c.batch_size = draws.between(1, 3);
  if (c.degrees.pp == 1) c.micro_batches = static_cast<int>(draws.between(1, 3));
  c.seq_length = c.degrees.cp > 1 ? 2 * c.degrees.cp * draws.between(1, 4) : draws.between(3, 29);
  c.data.unequal_labels = draws.one_in(2);
  c.generic_weights = !draws.one_in(4);
  c.steps = static_cast<int>(draws.between(1, 4));
  c.reload_after =
      c.steps > 1 && draws.one_in(3) ? static_cast<int>(draws.between(1, c.steps - 1)) : 0;
}

void draw_optimizer(Draws& draws, TrainSettings& settings) {
  OptimizerSettings& optimizer = settings.optimizer;
  optimizer.kind = draws.one_of({Optimizer::kSgd, Optimizer::kAdamW});
  const bool is_sgd = optimizer.kind == Optimizer::kSgd;
  optimizer.learning_rate = is_sgd ? draws.one_of({0.1, 0.01}) : draws.one_of({1e-3, 1e-2});
  optimizer.momentum = is_sgd && draws.one_in(2) ? 0.9 : 0.0;
  optimizer.weight_decay = draws.one_of({0.0, 0.01, 0.1});
  settings.schedule = {};
  settings.schedule.kind =
      draws.one_of({Schedule::kConstant, Schedule::kLinear, Schedule::kCosine});
  settings.max_grad_norm = draws.one_of({0.0, 0.1, 1.0});
}

/// One of those that users train in.
void draw_precision(Draws& draws, Case& c) {
  TrainSettings& settings = c.settings;
  settings.autocast.reset();
  settings.master_dtype.reset();
  settings.reduce_dtype.reset();
  settings.output_dtype.reset();
  settings.loss_scale = {};
  c.dtype = draws.one_of({Dtype::kFloat64, Dtype::kFloat32, Dtype::kFloat32, Dtype::kBFloat16,
                          Dtype::kBFloat16, Dtype::kFloat16});
  const bool is_sgd = settings.optimizer.kind == Optimizer::kSgd;
  if (c.dtype == Dtype::kBFloat16 && !(is_sgd && draws.one_in(2)))
    settings.master_dtype = Dtype::kFloat32;
  if (c.dtype == Dtype::kFloat16) settings.master_dtype = Dtype::kFloat32;
  if (c.dtype == Dtype::kFloat32 && draws.one_in(3))
    settings.autocast = draws.one_of({Dtype::kBFloat16, Dtype::kFloat16});
  if (c.dtype == Dtype::kFloat16 || settings.autocast == Dtype::kFloat16) {
    settings.loss_scale.kind =
        draws.one_of({LossScaleSettings::Kind::kStatic, LossScaleSettings::Kind::kDynamic});
    const bool is_dynamic = settings.loss_scale.kind == LossScaleSettings::Kind::kDynamic;
    settings.loss_scale.initial = is_dynamic ? draws.one_of({1024.0, 65536.0, 16777216.0}) : 1024.0;
    if (is_dynamic) {
      settings.loss_scale.backoff_factor = draws.one_of({0.5, 0.0009765625});
      settings.loss_scale.growth_interval = static_cast<int>(draws.between(1, 3));
    }
  }
  if (c.dtype == Dtype::kBFloat16 && has_setting(c, "reduce_dtype") && draws.one_in(2))
    settings.reduce_dtype = Dtype::kFloat32;
  if (c.dtype == Dtype::kBFloat16 && has_setting(c, "output_dtype") && draws.one_in(3))
    settings.output_dtype = Dtype::kFloat32;
}

void draw_loss(Draws& draws, TrainSettings& settings) {
  settings.loss_mean = draws.one_of({LossMean::kGlobal, LossMean::kLocal, LossMean::kSum});
  settings.label_smoothing = draws.one_of({0.0, 0.1});
}

void draw_layers(Draws& draws, Case& c) {
  set_dropout(c.config, draws.one_of({0.0, 0.1, 0.3}));
  c.settings.recompute_every = draws.one_of({0, 1, 2});
  c.attention = draws.one_of({AttentionImpl::kEager, AttentionImpl::kSdpa});
}

void draw_sums(Draws& draws, Case& c) {
  c.settings.bucket_bytes = draws.one_of<std::int64_t>({1 << 10, 1 << 13, 25 << 20});
  c.reduction_order =
      draws.one_of({ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree});
}

/// What only some subjects take.
void draw_own(Draws& draws, Case& c) {
  TrainSettings& settings = c.settings;
  if (has_setting(c, "zero_stage")) settings.zero_stage = static_cast<int>(draws.between(0, 2));
  if (has_setting(c, "make_vocab_size_divisible_by"))
    settings.make_vocab_size_divisible_by = draws.one_of<std::int64_t>({0, 1, 8});
  if (has_setting(c, "sequence_parallel")) settings.sequence_parallel = draws.one_in(2);
  if (has_setting(c, "distributed_optimizer")) settings.distributed_optimizer = draws.one_in(2);
  if (c.degrees.cp > 1) {
    settings.nd.context_order = draws.one_of({ContextOrder::kHeadTail, ContextOrder::kContiguous});
    settings.nd.context_attention =
        draws.one_of({ContextAttention::kAllGather, ContextAttention::kRing});
  }
}

void draw_frozen(Draws& draws, TrainSettings& settings) {
  settings.freeze = draws.one_of<const char*>({"", ".*norm.*", ".*mlp.*", ".*embed_tokens.*"});
}

Case drawn_around(Draws& draws, std::span<const Case> preset) {
  Case c = draws.one_of(preset);
  draw_degrees(draws, c);
  draw_sizes(draws, c);
  draw_run(draws, c);
  if (draws.one_in(3)) draw_optimizer(draws, c.settings);
  if (draws.one_in(3)) draw_precision(draws, c);
  if (draws.one_in(3)) draw_loss(draws, c.settings);
  if (draws.one_in(3)) draw_layers(draws, c);
  if (draws.one_in(2)) draw_sums(draws, c);
  if (draws.one_in(2)) draw_own(draws, c);
  if (draws.one_in(8)) draw_frozen(draws, c.settings);
  return c;
}

}  // namespace

Case thorough_case(std::uint64_t seed, std::int64_t index) {
  static const std::vector<Case> preset = preset_cases("thorough");
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    Draws draws(seed, fmt::format("thorough.{}.{}", index, attempt));
    Case c = drawn_around(draws, preset);
    try {
      c.validate();
      require_counted_tokens(c, CaseData(c));  // a document's end may be in no sample
      return c;
    } catch (const UsageError&) {
      continue;
    }
  }
  throw InfrastructureError(
      fmt::format("all {} draws of case {} of seed {} were refused", kMostAttempts, index, seed));
}

}  // namespace isoshard
