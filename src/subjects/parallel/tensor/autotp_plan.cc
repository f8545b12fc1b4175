// SPDX-License-Identifier: Apache-2.0
// The AutoTP plan, from what each parameter says of itself.
#include "subjects/parallel/tensor/autotp_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

ShardKind kind_of(const TpSplit& split, bool copies_kv_heads) {
  switch (split.role) {
    case TpRole::kColumn:
      return copies_kv_heads && split.is_kv ? ShardKind::kKvReplica : ShardKind::kColumn;
    case TpRole::kRow:
      return ShardKind::kRow;
    case TpRole::kReplicated:
    case TpRole::kVocab:
      return ShardKind::kReplicated;
  }
  return ShardKind::kReplicated;
}

// The first section of a parameter whose units tp does not divide, in words; empty if there is
// none.
std::string indivisible_section(const ParameterSpec& spec, int tp, bool copies_kv_heads) {
  if (kind_of(spec.tp, copies_kv_heads) == ShardKind::kReplicated ||
      kind_of(spec.tp, copies_kv_heads) == ShardKind::kKvReplica)
    return "";
  std::vector<std::int64_t> sections = spec.tp.sections;
  if (sections.empty()) sections.push_back(spec.shape.at(static_cast<std::size_t>(spec.tp.dim)));
  for (const std::int64_t section : sections) {
    const std::int64_t units = section / spec.tp.unit;
    if (units % tp != 0)
      return fmt::format("{} units of {} rows or columns in {}", units, spec.tp.unit, spec.name);
  }
  return "";
}

void check_sizes(const ModelConfig& config, int tp) {
  std::vector<std::string> problems;
  const auto check = [&](std::string_view what, std::int64_t size) {
    if (size % tp != 0) problems.push_back(fmt::format("{} {}", size, what));
  };
  check("attention heads", config.num_heads);
  // Above the number of kv heads, each is copied to equally many ranks.
  if (config.num_kv_heads < 1 || tp % config.num_kv_heads != 0)
    check("kv heads", config.num_kv_heads);
  check("ffn features", config.intermediate_size);
  if (!problems.empty()) {
    throw UsageError(fmt::format("tp {} does not divide the model's {}; use a tp degree that does",
                                 tp, fmt::join(problems, ", ")));
  }
}

void split_vocabulary(const Model& model, std::int64_t multiple, ShardPlan& plan) {
  if (multiple < 0)
    throw UsageError(
        fmt::format("the vocabulary must be padded to a multiple of at least 1, got {}", multiple));
  if (multiple == 0) return;
  const std::int64_t vocabulary = model.config().vocab_size, unit = multiple * plan.tp_degree;
  plan.vocab_size = vocabulary;
  plan.vocab_rows_per_rank = (vocabulary + unit - 1) / unit * multiple;
  for (const ParameterSpec& spec : model.parameters()) {
    if (spec.tp.role == TpRole::kVocab) plan.kinds[spec.name] = ShardKind::kVocabEmbedding;
  }
  // of a tied head too: it says how the module runs
  plan.kinds[model.head_module() + ".weight"] = ShardKind::kVocabHead;
}

}  // namespace

ShardPlan column_row_plan(const Model& model, int tp, std::int64_t make_vocab_size_divisible_by) {
  check_autotp_degree(model, tp);
  const ModelConfig& config = model.config();
  const bool copies_kv_heads = tp > config.num_kv_heads;
  ShardPlan plan;
  plan.tp_degree = tp;
  for (const ParameterSpec& spec : model.parameters()) {
    const ShardKind kind = kind_of(spec.tp, copies_kv_heads);
    if (kind != ShardKind::kReplicated) plan.kinds[spec.name] = kind;
  }
  split_vocabulary(model, make_vocab_size_divisible_by, plan);
  if (!copies_kv_heads) return plan;
  plan.num_kv_heads = static_cast<int>(config.num_kv_heads);
  for (int rank = 0; rank < tp; ++rank)
    plan.kv_head_of_rank.push_back(rank / (tp / plan.num_kv_heads));
  return plan;
}

ShardPlan autotp_plan(const Model& model, int tp, std::int64_t make_vocab_size_divisible_by) {
  ShardPlan plan = column_row_plan(model, tp, make_vocab_size_divisible_by);
  if (tp == 1)
    std::erase_if(plan.kinds, [](const auto& entry) { return entry.second == ShardKind::kRow; });
  return plan;
}

void check_autotp_degree(const Model& model, int tp) {
  if (tp < 1) throw UsageError(fmt::format("the tp degree must be at least 1, got {}", tp));
  if (tp == 1) return;
  check_sizes(model.config(), tp);
  const bool copies_kv_heads = tp > model.config().num_kv_heads;
  for (const ParameterSpec& spec : model.parameters()) {
    if (const std::string problem = indivisible_section(spec, tp, copies_kv_heads);
        !problem.empty()) {
      throw UsageError(
          fmt::format("tp {} does not divide the {}; use a tp degree that does", tp, problem));
    }
  }
}

}  // namespace isoshard
