// SPDX-License-Identifier: Apache-2.0
// Look-ups in a shard plan.
#include "parallel/tensor/shard_plan.h"

namespace isoshard {

std::string_view name_of(ShardKind kind) noexcept {
  switch (kind) {
    case ShardKind::kReplicated: return "replicated";
    case ShardKind::kColumn: return "column";
    case ShardKind::kRow: return "row";
  }
  return "unknown";
}

ShardKind ShardPlan::kind_of(std::string_view parameter) const {
  const auto found = kinds.find(parameter);
  return found == kinds.end() ? ShardKind::kReplicated : found->second;
}

ShardKind ShardPlan::kind_of_module(std::string_view module) const { return kind_of(std::string(module) + ".weight"); }

int ShardPlan::sharded_dim(const ParameterSpec& spec) const {
  switch (kind_of(spec.name)) {
    case ShardKind::kColumn: return 0;
    case ShardKind::kRow: return spec.shape.size() > 1 ? 1 : -1;
    case ShardKind::kReplicated: return -1;
  }
  return -1;
}

Layout ShardPlan::layout_of(const ParameterSpec& spec) const {
  Layout layout = replicated(spec.shape);
  const int dim = sharded_dim(spec);
  if (dim >= 0) layout.placements.push_back(shard(Axis::kTp, dim));
  return layout;
}

}  // namespace isoshard
