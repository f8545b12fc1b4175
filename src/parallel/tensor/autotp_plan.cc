// SPDX-License-Identifier: Apache-2.0
// The AutoTP plan by module name.
#include "parallel/tensor/autotp_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>
#include <vector>

#include "base/error.h"

namespace isoshard {
namespace {

constexpr std::array<std::string_view, 5> kColumnModules = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"};
constexpr std::array<std::string_view, 2> kKvModules = {"k_proj", "v_proj"};
constexpr std::array<std::string_view, 2> kRowModules = {"o_proj", "down_proj"};

// "q_proj" of "model.layers.0.self_attn.q_proj.weight".
std::string_view module_of(std::string_view parameter) {
  const std::size_t last = parameter.rfind('.');
  if (last == std::string_view::npos) return {};
  const std::string_view path = parameter.substr(0, last);
  const std::size_t before = path.rfind('.');
  return before == std::string_view::npos ? path : path.substr(before + 1);
}

bool holds(std::span<const std::string_view> names, std::string_view name) {
  for (const std::string_view candidate : names) {
    if (candidate == name) return true;
  }
  return false;
}

}  // namespace

ShardPlan autotp_plan(std::span<const ParameterSpec> specs) {
  ShardPlan plan;
  for (const ParameterSpec& spec : specs) {
    const std::string_view module = module_of(spec.name);
    if (holds(kColumnModules, module)) plan.kinds[spec.name] = ShardKind::kColumn;
    if (holds(kRowModules, module)) plan.kinds[spec.name] = ShardKind::kRow;
  }
  return plan;
}

ShardPlan autotp_plan(const Model& model, int tp) {
  const ModelConfig& config = model.config();
  check_autotp_degree(config, tp);
  const std::vector<ParameterSpec> specs = model.parameters();
  ShardPlan plan = autotp_plan(specs);
  if (tp <= config.num_kv_heads) return plan;
  for (auto& [name, kind] : plan.kinds) {
    if (holds(kKvModules, module_of(name))) kind = ShardKind::kKvReplica;
  }
  plan.num_kv_heads = static_cast<int>(config.num_kv_heads);
  for (int rank = 0; rank < tp; ++rank) plan.kv_head_of_rank.push_back(rank / (tp / plan.num_kv_heads));
  return plan;
}

void check_autotp_degree(const ModelConfig& config, int tp) {
  if (tp < 1) throw UsageError(fmt::format("a tp degree of {} is not possible; it must be at least 1", tp));
  // Norms over heads need their gradients summed over tp, and fused weights a plan of their own: running them would be silently wrong
  // or replicated.
  if (tp > 1 && (config.qk_norm || config.model_type == "gpt2")) {
    throw UsageError(fmt::format("autotp does not split {} yet; use tp 1", config.model_type));
  }
  std::vector<std::string> problems;
  const auto check = [&](std::string_view what, std::int64_t size) {
    if (size % tp != 0) problems.push_back(fmt::format("{} {}", size, what));
  };
  check("attention heads", config.num_heads);
  // Above the number of kv heads, each is copied to equally many ranks.
  if (config.num_kv_heads < 1 || tp % config.num_kv_heads != 0) check("kv heads", config.num_kv_heads);
  check("ffn features", config.intermediate_size);
  if (!problems.empty()) {
    throw UsageError(fmt::format("tp {} does not divide the model's {}; use a tp degree that does", tp, fmt::join(problems, ", ")));
  }
}

}  // namespace isoshard
