// SPDX-License-Identifier: Apache-2.0
// Configurations that have a name.
#include "model/builtin.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "base/error.h"
#include "base/suggest.h"

namespace isoshard {
namespace {

struct Entry {
  std::string_view name;
  std::int64_t hidden, ffn, layers, heads, kv_heads, vocabulary, max_positions;
  bool tied;
};

// The published ones as in their config.json on the Hub; all have theta 1e6, eps 1e-6 and initializer_range 0.02.
constexpr std::array kEntries{
    Entry{"small", 96, 192, 2, 6, 6, 252, 512, false},
    Entry{"tiny", 48, 96, 2, 6, 6, 96, 512, false},
    Entry{"Qwen/Qwen2.5-0.5B", 896, 4864, 24, 14, 2, 151936, 32768, true},
    Entry{"Qwen/Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 151936, 131072, true},
    Entry{"Qwen/Qwen2.5-7B", 3584, 18944, 28, 28, 4, 152064, 131072, false},
};

bool same_letters(std::string_view a, std::string_view b) {
  const auto lower = [](unsigned char c) { return std::tolower(c); };
  return std::ranges::equal(a, b, {}, lower, lower);
}

}  // namespace

ModelConfig builtin_config(std::string_view name) {
  const auto found = std::ranges::find_if(kEntries, [&](const Entry& entry) { return same_letters(entry.name, name); });
  if (found == kEntries.end()) {
    const std::vector<std::string> names = builtin_names();
    throw UsageError(fmt::format("unknown model '{}'{}; one of {}, or a config.json or a folder with one", name, did_you_mean(name, names),
                                 join_names(names)));
  }
  ModelConfig config;
  config.model_type = "qwen2";
  config.vocab_size = found->vocabulary;
  config.hidden_size = found->hidden;
  config.intermediate_size = found->ffn;
  config.num_layers = found->layers;
  config.num_heads = found->heads;
  config.num_kv_heads = found->kv_heads;
  config.head_dim = found->hidden / found->heads;
  config.max_positions = found->max_positions;
  config.norm_eps = 1e-6;
  config.initializer_range = 0.02;
  config.tie_word_embeddings = found->tied;
  config.qkv_bias = true;
  config.rope = {"default", 1e6};
  return config;
}

std::vector<std::string> builtin_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) names.emplace_back(entry.name);
  return names;
}

}  // namespace isoshard
