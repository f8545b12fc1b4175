// SPDX-License-Identifier: Apache-2.0
// Look-ups in a shard plan.
#include "subjects/parallel/tensor/shard_plan.h"

#include <algorithm>

namespace isoshard {

std::string_view name_of(ShardKind kind) noexcept {
  switch (kind) {
    case ShardKind::kReplicated:
      return "replicated";
    case ShardKind::kColumn:
      return "column";
    case ShardKind::kRow:
      return "row";
    case ShardKind::kKvReplica:
      return "kv_replica";
    case ShardKind::kVocabEmbedding:
      return "vocab_embedding";
    case ShardKind::kVocabHead:
      return "vocab_head";
  }
  return "unknown";
}

bool is_vocab(ShardKind kind) noexcept {
  return kind == ShardKind::kVocabEmbedding || kind == ShardKind::kVocabHead;
}

ShardKind ShardPlan::kind_of(std::string_view parameter) const {
  const auto found = kinds.find(parameter);
  return found == kinds.end() ? ShardKind::kReplicated : found->second;
}

ShardKind ShardPlan::kind_of_module(std::string_view module) const {
  return kind_of(std::string(module) + ".weight");
}

int ShardPlan::sharded_dim(const ParameterSpec& spec) const {
  return kind_of(spec.name) == ShardKind::kReplicated ? -1 : spec.tp.dim;
}

Layout ShardPlan::layout_of(const ParameterSpec& spec, int tp_rank) const {
  Layout layout = replicated(spec.shape);
  const int dim = sharded_dim(spec);
  if (dim < 0) return layout;
  const auto d = static_cast<std::size_t>(dim);
  const Box whole{Shape(spec.shape.size(), 0), Shape(spec.shape.size(), 0), spec.shape};
  if (kind_of(spec.name) == ShardKind::kKvReplica) {
    Box& box = layout.boxes.emplace_back(whole);
    box.size[d] /= num_kv_heads;
    box.global_offset[d] = box.size[d] * kv_head_of_rank.at(static_cast<std::size_t>(tp_rank));
    layout.explicit_parts = true;
  } else if (is_vocab(kind_of(spec.name))) {
    const VocabShard shard = vocab_shard(tp_rank);
    Box box = whole;
    box.size[d] = shard.count;
    box.global_offset[d] = shard.begin;
    if (shard.count > 0) layout.boxes = {std::move(box)};
    layout.explicit_parts = true;
  } else if (spec.tp.sections.size() < 2) {
    layout.placements.push_back(shard(Axis::kTp, dim));
  } else {
    std::int64_t local = 0, global = 0;
    for (const std::int64_t section : spec.tp.sections) {
      Box& box = layout.boxes.emplace_back(whole);
      box.size[d] = section / tp_degree;
      box.local_offset[d] = local;
      box.global_offset[d] = global + tp_rank * box.size[d];
      local += box.size[d];
      global += section;
    }
    layout.explicit_parts = true;
  }
  return layout;
}

VocabShard ShardPlan::vocab_shard(int tp_rank) const {
  const std::int64_t begin = std::min(vocab_size, tp_rank * vocab_rows_per_rank);
  return {vocab_size, begin, std::min(vocab_rows_per_rank, vocab_size - begin),
          vocab_rows_per_rank};
}

bool ShardPlan::counts_shard(const ParameterSpec& spec, int tp_rank) const {
  if (kind_of(spec.name) != ShardKind::kKvReplica) return true;
  const auto own = kv_head_of_rank.begin() + tp_rank;
  return std::find(kv_head_of_rank.begin(), own, *own) == own;
}

ParamClass ShardPlan::class_of(const ParameterSpec& spec) const {
  return kind_of(spec.name) == ShardKind::kKvReplica ? ParamClass::kKvReplica : spec.param_class;
}

}  // namespace isoshard
