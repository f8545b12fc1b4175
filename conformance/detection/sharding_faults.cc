// SPDX-License-Identifier: Apache-2.0
/// Class E: which part of a tensor a rank holds; and class H: the values that parts are drawn from.
#include <ATen/ATen.h>

#include <functional>

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
  Fault fault{.id = "embed_out_split_without_sp", .fault_class = 'E', .subjects = {"autotp", "fsdp_tp"}};
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
  Fault fault{.id = "kv_head_on_wrong_rank", .fault_class = 'E', .subjects = {"autotp", "megatron"}};
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
  Fault fault{.id = "init_seed_plus_rank", .fault_class = 'H', .subjects = {"autotp", "fsdp_tp"}};
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

/// Where a fault reads a piece of a fused weight: `section` begins at `begin`, and the pieces of the sections before it have
/// `before` entries in a shard.
using PlaceOfPiece = std::function<std::int64_t(std::int64_t begin, std::int64_t before, std::int64_t whole, int tp_rank, int tp)>;

/// Reads each piece of a weight that fuses several sections (gate and up; q, k and v) from another place.
void read_fused_weights_at(const PlaceOfPiece& place, TrainerParts& parts, Mesh& mesh, const FaultProbe& probe) {
  const int tp_rank = mesh.coordinate(Axis::kTp), tp = mesh.degree(Axis::kTp);
  parts.weights = weights_twin(parts.weights, [=](const WeightSource& inner, const ParameterSpec& spec, Shape offset, const Shape& size) {
    const auto dim = static_cast<std::size_t>(spec.tp.dim);
    std::int64_t begin = 0;
    for (const std::int64_t section : spec.tp.sections) {
      if (offset[dim] >= begin + section) {
        begin += section;
        continue;
      }
      const std::int64_t wrong = place(begin, begin / tp, spec.shape[dim], tp_rank, tp);
      if (wrong != offset[dim]) probe.fired();
      offset[dim] = wrong;
      break;
    }
    return inner.read(spec, offset, size);
  });
}

Fault gate_up_cut_as_one_block() {
  Fault fault{.id = "gate_up_cut_as_one_block", .fault_class = 'E', .subjects = {"autotp", "megatron"}};
  fault.summary = "The fused gate/up weight was cut in tp pieces as one block; gate and up must each be cut.";
  fault.source = "Megatron-LM #360, PR 520";
  fault.smallest_case = [] { return fault_case("gpt2", "autotp", 2, 3); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    const auto place = [](std::int64_t, std::int64_t before, std::int64_t whole, int tp_rank, int tp) {
      return tp_rank * (whole / tp) + before;
    };
    read_fused_weights_at(place, parts, mesh, probe);
  };
  fault.expected = {Stage::kParametersRead, "transformer.h.0.attn.c_attn.weight", any_rank(6), "as one block"};
  return fault;
}

Fault fused_shards_all_from_rank0() {
  Fault fault{.id = "fused_shards_all_from_rank0", .fault_class = 'E', .subjects = {"autotp", "megatron"}};
  fault.summary = "The loader of fused weights took the tp rank from an argument nobody passed; all ranks loaded shard 0.";
  fault.source = "vllm-gguf-plugin #103";
  fault.smallest_case = [] { return fault_case("gpt2", "autotp", 3, 2); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    const auto place = [](std::int64_t begin, std::int64_t, std::int64_t, int, int) { return begin; };
    read_fused_weights_at(place, parts, mesh, probe);
  };
  fault.expected = {Stage::kParametersRead, "transformer.h.0.attn.c_attn.weight", {1, 2, 4, 5}, "tp ranks 1, 2 equal the shard of rank 0"};
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
  for (Fault (*make)() :
       {embed_out_split_without_sp, kv_head_on_wrong_rank, gate_up_cut_as_one_block, fused_shards_all_from_rank0, init_seed_plus_rank})
    faults.push_back(make());
}

}  // namespace isoshard
