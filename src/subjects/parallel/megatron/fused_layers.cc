// SPDX-License-Identifier: Apache-2.0
// Groups by module names, and rows by turns.
#include "subjects/parallel/megatron/fused_layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

struct Kind {
  std::array<std::string_view, 3> modules;
  bool by_kv_group;
};
constexpr std::array<Kind, 2> kKinds = {Kind{{"q_proj", "k_proj", "v_proj"}, true},
                                        Kind{{"gate_proj", "up_proj", ""}, false}};

std::int64_t rows_of(const ParameterSpec& spec, const ShardPlan& plan) {
  const int parts =
      plan.kind_of(spec.name) == ShardKind::kKvReplica ? plan.num_kv_heads : plan.tp_degree;
  return spec.shape.at(0) / parts;
}

const ParameterSpec* find(const std::vector<ParameterSpec>& specs, const std::string& name) {
  const auto found = std::find_if(specs.begin(), specs.end(),
                                  [&](const ParameterSpec& spec) { return spec.name == name; });
  return found == specs.end() ? nullptr : &*found;
}

// A fused tensor's shape and the runs of its parts.
StoredParameter fused_parameter(const FusedLayers& group, const std::string& suffix,
                                std::span<const std::string> names, std::span<const Shape> shapes) {
  StoredParameter stored;
  stored.name = megatron_name(group.modules.front() + suffix);
  const std::int64_t rows_per_turn =
      std::accumulate(group.rows.begin(), group.rows.end(), std::int64_t{0});
  std::int64_t before = 0;
  for (std::size_t m = 0; m < group.modules.size(); ++m) {
    const auto found = std::find(names.begin(), names.end(), group.modules[m] + suffix);
    if (found == names.end())
      throw ShapeError(
          fmt::format("{} has no {} to fuse with {}", group.modules[m], suffix, stored.name));
    const std::size_t index = static_cast<std::size_t>(found - names.begin());
    const Shape& shape = shapes[index];
    if (shape.at(0) != group.turns * group.rows[m]) {
      throw ShapeError(fmt::format("the rows of {} must be {} turns of {}, got {}", *found,
                                   group.turns, group.rows[m], shape[0]));
    }
    const std::int64_t row = numel_of(shape) / shape[0];
    stored.parameters.push_back(index);
    std::vector<StoredRun>& runs = stored.runs.emplace_back();
    for (std::int64_t turn = 0; turn < group.turns; ++turn) {
      runs.push_back(
          {turn * group.rows[m] * row, (turn * rows_per_turn + before) * row, group.rows[m] * row});
    }
    before += group.rows[m];
    stored.shape = shape;
  }
  stored.shape[0] = group.turns * rows_per_turn;
  return stored;
}

}  // namespace

std::vector<FusedLayers> fused_layers(const Model& model, const ShardPlan& plan) {
  std::vector<FusedLayers> groups;
  if (model.config().model_type == "lattice") return groups;
  const std::vector<ParameterSpec> specs = model.parameters();
  for (const ParameterSpec& spec : specs) {
    for (const Kind& kind : kKinds) {
      const std::string first = fmt::format(".{}.weight", kind.modules[0]);
      if (!spec.name.ends_with(first)) continue;
      const std::string block = spec.name.substr(0, spec.name.size() - first.size());
      FusedLayers group;
      group.turns = kind.by_kv_group
                        ? std::max<std::int64_t>(1, model.config().num_kv_heads / plan.tp_degree)
                        : 1;
      for (const std::string_view module : kind.modules) {
        if (module.empty()) continue;
        const std::string name = fmt::format("{}.{}", block, module);
        const ParameterSpec* const part = find(specs, name + ".weight");
        if (part == nullptr)
          throw ShapeError(fmt::format("{} has no {} to be fused with", spec.name, name));
        group.modules.push_back(name);
        group.rows.push_back(rows_of(*part, plan) / group.turns);
      }
      groups.push_back(std::move(group));
    }
  }
  return groups;
}

std::vector<StoredParameter> stored_parameters(std::span<const std::string> names,
                                               std::span<const Shape> shapes,
                                               std::span<const FusedLayers> groups) {
  std::vector<StoredParameter> result;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::size_t dot = names[i].rfind('.');
    const std::string module = names[i].substr(0, dot);
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const FusedLayers& g) {
      return std::find(g.modules.begin(), g.modules.end(), module) != g.modules.end();
    });
    if (group == groups.end()) {
      result.push_back({megatron_name(names[i]), shapes[i], {i}, {{{0, 0, numel_of(shapes[i])}}}});
    } else if (group->modules.front() == module) {
      result.push_back(fused_parameter(*group, names[i].substr(dot), names, shapes));
    }
  }
  return result;
}

bool is_frozen_unit(const StoredParameter& unit,
                    const std::function<bool(std::size_t parameter)>& is_frozen) {
  const auto count = std::ranges::count_if(unit.parameters, is_frozen);
  if (count == 0 || count == std::ssize(unit.parameters)) return count != 0;
  throw UsageError(
      fmt::format("frozen weights must be all or none of what Megatron keeps in one tensor, got {} "
                  "of the {} of "
                  "{}",
                  count, unit.parameters.size(), unit.name));
}

std::string megatron_name(std::string_view parameter) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 15> kNames = {{
      {"model.embed_tokens.", "embedding.word_embeddings."},
      {"model.norm.", "decoder.final_layernorm."},
      {"lm_head.", "output_layer."},
      {"model.layers.", "decoder.layers."},
      {".self_attn.q_proj.", ".self_attention.linear_qkv."},
      {".self_attn.k_proj.", ".self_attention.linear_qkv."},
      {".self_attn.v_proj.", ".self_attention.linear_qkv."},
      {".self_attn.o_proj.", ".self_attention.linear_proj."},
      {".self_attn.q_norm.", ".self_attention.q_layernorm."},
      {".self_attn.k_norm.", ".self_attention.k_layernorm."},
      {".post_attention_layernorm.", ".pre_mlp_layernorm."},
      {".mlp.gate_proj.", ".mlp.linear_fc1."},
      {".mlp.up_proj.", ".mlp.linear_fc1."},
      {".mlp.down_proj.", ".mlp.linear_fc2."},
      {".input_layernorm.", ".input_layernorm."},
  }};
  std::string name(parameter);
  for (const auto& [theirs, ours] : kNames) {
    const std::size_t at = name.find(theirs);
    if (at == std::string::npos || (theirs.front() != '.' && at != 0)) continue;
    name.replace(at, theirs.size(), ours);
  }
  return name;
}

}  // namespace isoshard
