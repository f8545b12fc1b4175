// SPDX-License-Identifier: Apache-2.0
// Draws of correct cases.
#include "suite/calibration/clean_cases.h"

#include <fmt/format.h>

#include "core/base/error.h"
#include "fixtures/cases/draws.h"
#include "fixtures/inputs/inputs.h"
#include "subjects/model/config/builtin.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

constexpr int kMaxRanks = 6;
constexpr int kMaxAttempts = 1000;
constexpr std::int64_t kBytesNeedVocabulary = 123;  // the largest byte of the project's text is 'z'

void draw_mesh(Draws& draws, Case& c) {
  do {
    c.degrees.dp = static_cast<int>(draws.between(1, 3));
    c.degrees.tp = static_cast<int>(draws.between(1, 4));
  } while (c.degrees.dp * c.degrees.tp > kMaxRanks || c.degrees.dp * c.degrees.tp == 1);
  c.subject = c.degrees.tp > 1 || draws.one_in(3) ? "autotp" : "ddp";
}

void draw_attention(Draws& draws, ModelConfig& config, int tp) {
  const bool is_gpt2 = config.model_type == "gpt2";
  draw_head_counts(draws, config, tp, is_gpt2);
  config.head_dim = 2 * draws.between(2, 8);
  config.hidden_size = is_gpt2 ? config.num_heads * config.head_dim : draws.between(12, 72);
}

void draw_model(Draws& draws, Case& c) {
  ModelConfig& config = c.config;
  config.model_type = draws.one_of<const char*>({"qwen2", "qwen2", "llama", "qwen3", "gpt2"});
  const bool is_gpt2 = config.model_type == "gpt2";
  const bool is_llama = config.model_type == "llama";
  config.num_layers = draws.between(1, 3);
  config.vocab_size =
      draws.one_in(2) ? draws.between(kBytesNeedVocabulary, 140) : draws.between(17, 131);
  draw_attention(draws, config, c.degrees.tp);
  config.intermediate_size = c.degrees.tp * draws.between(6, 40);
  config.max_positions = 64;
  config.norm_eps = draws.one_of({1e-5, 1e-6});
  config.tie_word_embeddings = draws.one_in(3);
  config.qk_norm = config.model_type == "qwen3";
  config.qkv_bias = config.model_type == "qwen2" || is_gpt2 || (is_llama && draws.one_in(3));
  config.attention_out_bias = is_gpt2 || (is_llama && config.qkv_bias);
  config.mlp_bias = is_gpt2 || (is_llama && draws.one_in(3));
  config.rope.theta = draws.one_of({1e4, 1e6});
  if (is_llama && draws.one_in(3)) config.rope = {"llama3", 1e4, 8.0, 1.0, 4.0, 16};
  c.model_name = config.model_type;
}

void draw_batch(Draws& draws, Case& c) {
  c.batch_size = draws.between(1, 3);
  c.micro_batches = draws.one_in(3) ? static_cast<int>(draws.between(2, 3)) : 1;
  c.seq_length = draws.between(2, 29);
  const bool fits_text = c.config.vocab_size >= kBytesNeedVocabulary;
  c.data.kind =
      fits_text && draws.one_in(2) ? DataSource::Kind::kText : DataSource::Kind::kRandomIds;
  c.data.unequal_labels = draws.one_in(3);
}

void draw_settings(Draws& draws, Case& c) {
  c.dtype = draws.one_of({Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16});
  c.attention = draws.one_of({AttentionImpl::kEager, AttentionImpl::kSdpa});
  c.seed = static_cast<std::uint64_t>(draws.between(0, 1'000'000));
  c.generic_weights = draws.one_in(2);
  c.init_std = draws.one_of({0.02, 0.02, 0.05});
  c.steps = draws.one_in(4) ? 2 : 1;
  TrainSettings& settings = c.settings;
  OptimizerSettings& optimizer = settings.optimizer;
  optimizer.kind = draws.one_of({OptimizerSettings::Kind::kSgd, OptimizerSettings::Kind::kAdamW});
  const bool is_sgd = optimizer.kind == OptimizerSettings::Kind::kSgd;
  optimizer.learning_rate = is_sgd ? draws.one_of({0.1, 0.01}) : draws.one_of({1e-3, 1e-2});
  optimizer.momentum = is_sgd && draws.one_in(2) ? 0.9 : 0.0;
  optimizer.weight_decay = draws.one_in(2) ? 0.01 : 0.0;
  settings.max_grad_norm = draws.one_of({0.0, 0.1, 1.0});
  settings.loss_mean = draws.one_in(3) ? LossMean::kLocal : LossMean::kGlobal;
  settings.bucket_bytes = draws.one_of<std::int64_t>({1 << 10, 1 << 14, 25 << 20});
}

/// What fewer users choose.
void draw_special(Draws& draws, Case& c) {
  TrainSettings& settings = c.settings;
  if (draws.one_in(8)) {
    c.config.model_type = c.model_name = "megatron_gpt";
    c.config.qk_norm = false;
    c.config.qkv_bias = c.config.attention_out_bias = c.config.mlp_bias = true;
    c.config.learned_positions = draws.one_in(2);
    c.config.rope = {};
  }
  const bool is_sgd = settings.optimizer.kind == OptimizerSettings::Kind::kSgd;
  if (is_sgd && draws.one_in(6)) c.dtype = Dtype::kFloat16;
  if (c.dtype == Dtype::kFloat32 && draws.one_in(4))
    settings.autocast = draws.one_of({Dtype::kBFloat16, Dtype::kBFloat16, Dtype::kFloat16});
  if (subject_spec(c.subject).takes("make_vocab_size_divisible_by") && draws.one_in(3))
    settings.make_vocab_size_divisible_by = draws.one_of<std::int64_t>({1, 1, 8});
  if (draws.one_in(5)) settings.label_smoothing = 0.1;
  if (draws.one_in(8)) settings.loss_mean = LossMean::kSum;
  if (draws.one_in(3))
    c.reduction_order = draws.one_of({ReductionOrder::kRing, ReductionOrder::kTree});
  if (draws.one_in(10)) {  // sums over hundreds of tokens
    c.seq_length = draws.between(64, 300);
    c.config.max_positions = 512;
    c.config.num_layers = draws.between(1, 2);
  }
}

Case drawn(std::uint64_t seed, std::int64_t index, int attempt) {
  Draws draws(seed, fmt::format("calibration.{}.{}", index, attempt));
  Case c;
  draw_mesh(draws, c);
  draw_model(draws, c);
  draw_batch(draws, c);
  draw_settings(draws, c);
  draw_special(draws, c);
  return c;
}

}  // namespace

void draw_head_counts(Draws& draws, ModelConfig& config, int tp, bool has_own_keys) {
  config.num_heads = tp * draws.between(1, 3);
  do {
    config.num_kv_heads =
        has_own_keys || draws.one_in(3) ? config.num_heads : draws.between(1, config.num_heads);
  } while (config.num_heads % config.num_kv_heads != 0 ||
           (tp % config.num_kv_heads != 0 && config.num_kv_heads % tp != 0));
}

Case clean_case(std::uint64_t seed, std::int64_t index) {
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    Case c = drawn(seed, index, attempt);
    try {
      c.validate();
      return c;
    } catch (const UsageError&) {
      continue;
    }
  }
  throw InfrastructureError(fmt::format("all {} draws of clean case {} of seed {} were refused",
                                        kMaxAttempts, index, seed));
}

}  // namespace isoshard
