// SPDX-License-Identifier: Apache-2.0
/// Class E: which part of a tensor a rank holds; and class H: the values that parts are drawn from.
#include <ATen/ATen.h>

#include "conformance/detection/catalogue.h"
#include "conformance/detection/twins.h"

namespace isoshard {
namespace {

/// Keeps this tp rank's part of the sequence and repeats it to the full length.
at::Tensor repeat_own_sequence_part(const at::Tensor& x_BSH, int tp_rank, int tp) {
  const std::int64_t part = x_BSH.size(1) / tp;
  const at::Tensor own = x_BSH.narrow(1, tp_rank * part, part);
  std::vector<at::Tensor> pieces(static_cast<std::size_t>(tp), own);
  if (const std::int64_t rest = x_BSH.size(1) - part * tp; rest > 0) pieces.push_back(own.narrow(1, 0, rest));
  return at::cat(pieces, 1);
}

Fault embed_out_split_without_sp() {
  Fault fault{.id = "embed_out_split_without_sp", .fault_class = 'E', .subjects = {"autotp"}};
  fault.summary = "The embedding output was laid out as split over the sequence although sequence parallelism was off.";
  fault.source = "benchmark_tp 2faebc2";
  fault.smallest_case = [] { return fault_case("qwen2", "autotp", 2, 3); };
  fault.hooks.tap = [](const Case& item, int rank) -> TapMutation {
    const int tp_rank = item.mesh().coordinate(rank, Axis::kTp);
    return [tp_rank, tp = item.tp](const Site& site, at::Tensor value) {
      if (site.kind != RecordKind::kActivation || !is_token_embedding(site.name) || tp < 2) return value;
      return repeat_own_sequence_part(value, tp_rank, tp);
    };
  };
  fault.expected = {Stage::kForward, "model.embed_tokens", any_rank(6), "copies differ over tp"};
  return fault;
}

Fault kv_head_on_wrong_rank() {
  Fault fault{.id = "kv_head_on_wrong_rank", .fault_class = 'E', .subjects = {"autotp"}};
  fault.summary = "With fewer kv heads than tp ranks, the part that belongs to a rank's query heads was chosen wrongly or not at all.";
  fault.source = "Megatron-LM #3575; transformers #48307";
  fault.smallest_case = copied_kv_heads_case;
  fault.hooks.plan = [](ShardPlan& plan, const Mesh&, const FaultProbe& probe) {
    for (std::size_t rank = 0; rank < plan.kv_head_of_rank.size(); ++rank) {
      const int wrong = static_cast<int>(rank) % plan.num_kv_heads;
      if (wrong != plan.kv_head_of_rank[rank]) probe.fired();
      plan.kv_head_of_rank[rank] = wrong;
    }
  };
  fault.expected = {Stage::kForward, "model.layers.0.self_attn.core", {1, 2}, "tp ranks 1, 2 use parts 1, 0"};
  return fault;
}

Fault init_seed_plus_rank() {
  Fault fault{.id = "init_seed_plus_rank", .fault_class = 'H', .subjects = {"autotp"}};
  fault.summary = "Every rank drew its weights with seed + rank, so the tp shards came from different matrices.";
  fault.source = "ray_train_tensor_parallel f024a4e";
  fault.smallest_case = [] { return fault_case("llama", "autotp", 3, 2); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case& item, const FaultProbe& probe) {
    Case drawn = item;
    drawn.seed += static_cast<std::uint64_t>(mesh.coordinate(Axis::kTp));
    if (drawn.seed == item.seed || !item.weights_path.empty()) return;  // weights from a file are not drawn
    probe.fired();
    parts.weights = case_weights(drawn);
  };
  fault.expected = {Stage::kParametersRead, "model.embed_tokens.weight", {1, 2, 4, 5}, "tp ranks 1, 2 are not slices of the reference"};
  return fault;
}

}  // namespace

Case copied_kv_heads_case() {
  Case item = fault_case("qwen2", "autotp", 4, 1);
  item.config.num_heads = 8;
  item.config.num_kv_heads = 2;
  item.config.head_dim = 6;
  item.model_name += "_h8kv2";
  return item;
}

void add_sharding_faults(Faults& faults) {
  for (Fault (*make)() : {embed_out_split_without_sp, kv_head_on_wrong_rank, init_seed_plus_rank}) faults.push_back(make());
}

}  // namespace isoshard
