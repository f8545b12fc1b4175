// SPDX-License-Identifier: Apache-2.0
// Configurations that have a name.
#include "subjects/model/config/builtin.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {

struct Entry {
  std::string_view name, model_type;
  std::int64_t hidden, ffn, layers, heads, kv_heads, head_dim, vocabulary, max_positions;
  double theta, eps;  // theta 0: no rotary positions
  bool tied;
};

// The published ones as in their config.json on the Hub; all have initializer_range 0.02.
constexpr std::array kEntries{
    Entry{"small", "qwen2", 96, 192, 2, 6, 6, 16, 252, 512, 1e6, 1e-6, false},
    Entry{"tiny", "qwen2", 48, 96, 2, 6, 6, 8, 96, 512, 1e6, 1e-6, false},
    Entry{"tiny-qwen3", "qwen3", 48, 96, 2, 6, 6, 8, 96, 512, 1e6, 1e-6, false},
    Entry{"tiny-llama", "llama", 48, 96, 2, 6, 6, 8, 96, 512, 5e5, 1e-5, false},
    Entry{"tiny-mistral", "mistral", 48, 96, 2, 6, 6, 8, 96, 512, 1e6, 1e-5, false},
    Entry{"tiny-megatron_gpt", "megatron_gpt", 48, 96, 2, 6, 6, 8, 96, 512, 0, 1e-5, false},
    Entry{"tiny-gqa", "qwen2", 52, 100, 2, 8, 4, 6, 101, 512, 1e6, 1e-6, false},
    Entry{"tiny-gqa-kv2", "qwen2", 52, 100, 2, 8, 2, 6, 101, 512, 1e6, 1e-6, false},
    Entry{"tiny-tied-gqa", "qwen3", 52, 100, 2, 8, 2, 6, 101, 512, 1e6, 1e-6, true},
    Entry{"lattice", "lattice", 16, 24, 2, 12, 12, 2, 40, 64, 0, 1e-6, false},
    Entry{"lattice-2", "lattice", 16, 24, 2, 12, 12, 2, 40, 64, 0, 1e-6, false},
    Entry{"tiny-gpt2", "gpt2", 48, 96, 2, 6, 6, 8, 96, 512, 0, 1e-5, true},
    Entry{"Qwen/Qwen2.5-0.5B", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, 1e6, 1e-6, true},
    Entry{"Qwen/Qwen2.5-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 131072, 1e6, 1e-6,
          true},
    Entry{"Qwen/Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 131072, 1e6, 1e-6,
          false},
    Entry{"Qwen/Qwen2.5-7B-Instruct", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768, 1e6,
          1e-6, false},
    Entry{"Qwen/Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, 1e6, 1e-6, true},
    Entry{"Qwen/Qwen3-32B", "qwen3", 5120, 25600, 64, 64, 8, 128, 151936, 40960, 1e6, 1e-6, false},
    Entry{"meta-llama/Llama-3-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 8192, 5e5, 1e-5,
          false},
    Entry{"meta-llama/Llama-3.2-1B", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, 1e-5,
          true},
    Entry{"mistralai/Mistral-7B-v0.3", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768, 1e6,
          1e-5, false},
    Entry{"megatron-gpt", "megatron_gpt", 1024, 4096, 28, 16, 16, 64, 51200, 4096, 0, 1e-5, false},
    Entry{"gpt2", "gpt2", 768, 3072, 12, 12, 12, 64, 50257, 1024, 0, 1e-5, true},
};
bool same_letters(std::string_view a, std::string_view b) {
  const auto lower = [](unsigned char c) { return std::tolower(c); };
  return std::ranges::equal(a, b, {}, lower, lower);
}

ModelConfig config_of(const Entry& entry) {
  ModelConfig config;
  config.model_type = entry.model_type;
  config.vocab_size = entry.vocabulary;
  config.hidden_size = entry.hidden;
  config.intermediate_size = entry.ffn;
  config.num_layers = entry.layers;
  config.num_heads = entry.heads;
  config.num_kv_heads = entry.kv_heads;
  config.head_dim = entry.head_dim;
  config.max_positions = entry.max_positions;
  config.norm_eps = entry.eps;
  config.initializer_range = 0.02;
  config.tie_word_embeddings = entry.tied;
  const bool is_lattice = entry.model_type == "lattice",
             is_gpt = entry.model_type == "gpt2" || entry.model_type == "megatron_gpt";
  config.qkv_bias = entry.model_type == "qwen2" || is_gpt;
  config.attention_out_bias = config.mlp_bias = is_gpt || is_lattice;
  config.learned_positions = entry.model_type == "megatron_gpt" && entry.theta == 0;
  if (is_lattice) config.row_nonzeros = entry.name == "lattice" ? 1 : 2;
  config.qk_norm = entry.model_type == "qwen3";
  if (entry.theta > 0) config.rope.theta = entry.theta;
  if (entry.name == "meta-llama/Llama-3.2-1B")
    config.rope = {"llama3", entry.theta, 32.0, 1.0, 4.0, 8192};
  return config;
}

}  // namespace

ModelConfig builtin_config(std::string_view name) {
  // without its organization a published name is known, too
  const auto found = std::ranges::find_if(kEntries, [&](const Entry& entry) {
    const std::string_view own = entry.name.substr(entry.name.find('/') + 1);
    return same_letters(entry.name, name) || same_letters(own, name);
  });
  if (found != kEntries.end()) return config_of(*found);
  const std::vector<std::string> names = builtin_names();
  throw UsageError(
      fmt::format("unknown model '{}'{}; it must be one of {}, a config.json or a folder with one",
                  name, did_you_mean(name, names), join_names(names)));
}

std::vector<std::string> builtin_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) names.emplace_back(entry.name);
  return names;
}

}  // namespace isoshard
