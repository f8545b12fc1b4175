// SPDX-License-Identifier: Apache-2.0
/// Class E: which part of a tensor a rank holds; and class H: the values that parts are drawn from.
#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/parallel/megatron/fused_layers.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"
#include "suite/record/make_subject.h"

namespace isoshard {
namespace {

/// Keeps this tp rank's part of the sequence and repeats it to the full length.
at::Tensor repeat_own_sequence_part(const at::Tensor& x_BSH, int tp_rank, int tp) {
  const std::int64_t part = x_BSH.size(1) / tp;
  const at::Tensor own = x_BSH.narrow(1, tp_rank * part, part);
  std::vector<at::Tensor> pieces(static_cast<std::size_t>(tp), own);
  if (const std::int64_t rest = x_BSH.size(1) - part * tp; rest > 0)
    pieces.push_back(own.narrow(1, 0, rest));
  return at::cat(pieces, 1);
}

Fault embed_out_split_without_sp() {
  Fault fault{
      .id = "embed_out_split_without_sp", .fault_class = 'E', .subjects = {"autotp", "fsdp_tp"}};
  fault.summary =
      "The embedding output was laid out as split over the sequence although sequence parallelism "
      "was off.";
  fault.source = "benchmark_tp 2faebc2";
  fault.smallest_case = [] { return fault_case("qwen2", "autotp", {.dp = 3, .tp = 2}); };
  fault.hooks.tap = [](const Case& item, int rank) -> TapMutation {
    const int tp_rank = item.mesh().coordinate(rank, Axis::kTp);
    return [tp_rank, tp = item.degrees.tp](const Site& site, at::Tensor value) {
      if (site.kind != RecordKind::kActivation || !is_token_embedding(site.name) || tp < 2 ||
          value.size(1) < tp)
        return value;
      return repeat_own_sequence_part(value, tp_rank, tp);
    };
  };
  fault.expected = {Stage::kForward,
                    "model.embed_tokens",
                    any_rank(6),
                    {CauseId::kSlicesRepeated, {{"axes", "tp"}}}};
  return fault;
}

Fault kv_head_on_wrong_rank() {
  Fault fault{
      .id = "kv_head_on_wrong_rank", .fault_class = 'E', .subjects = {"autotp", "megatron"}};
  fault.summary =
      "With fewer kv heads than tp ranks, the part that belongs to a rank's query heads was chosen "
      "wrongly or not at all.";
  fault.source = "Megatron-LM #3575; transformers #48307";
  fault.smallest_case = copied_kv_heads_case;
  fault.hooks.plan = [](ShardPlan& plan, const Mesh&, const FaultProbe& probe) {
    for (std::size_t rank = 0; rank < plan.kv_head_of_rank.size(); ++rank) {
      const int wrong = static_cast<int>(rank) % plan.num_kv_heads;
      if (wrong != plan.kv_head_of_rank[rank]) probe.fired();
      plan.kv_head_of_rank[rank] = wrong;
    }
  };
  fault.expected = {
      Stage::kForward,
      "model.layers.0.self_attn.core",
      {1, 2},
      {CauseId::kPartsOutOfOrder,
       {{"axis", "tp"}, {"coordinates", std::vector{1, 2}}, {"parts", std::vector{1, 0}}}}};
  return fault;
}

Fault init_seed_plus_rank() {
  Fault fault{.id = "init_seed_plus_rank", .fault_class = 'H', .subjects = {"autotp", "fsdp_tp"}};
  fault.summary =
      "Every rank drew its weights with seed + rank, so the tp shards came from different "
      "matrices.";
  fault.source = "ray_train_tensor_parallel f024a4e";
  fault.smallest_case = [] { return fault_case("llama", "autotp", {.dp = 2, .tp = 3}); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case& item,
                         const FaultProbe& probe) {
    Case drawn = item;
    drawn.seed += static_cast<std::uint64_t>(mesh.coordinate(Axis::kTp));
    // weights from a file are not drawn
    if (drawn.seed == item.seed || !item.weights_path.empty()) return;
    probe.fired();
    parts.weights = case_weights(drawn);
  };
  fault.expected = {Stage::kParametersRead,
                    "model.embed_tokens.weight",
                    {1, 2, 4, 5},
                    {CauseId::kNotSlices, {{"axis", "tp"}, {"ranks", std::vector{1, 2, 4, 5}}}}};
  return fault;
}

/// A part of what is stored as one: rows (or columns) [begin, begin + size) of a parameter's fused
/// dim.
struct FusedPart {
  ParameterSpec spec;
  std::int64_t begin = 0, size = 0;
};

/// A fused weight or bias, its parts one after the other.
using FusedWeight = std::vector<FusedPart>;

/// Which parameters a subject fuses, from outside: those that fuse sections already (GPT-2's q, k
/// and v), the model's layers that Megatron keeps as one (gate and up; q, k and v), and a weight of
/// whole kv groups, which Megatron's own model has.
std::vector<FusedWeight> fused_weights(const TrainerParts& parts, const Case& item) {
  std::vector<FusedWeight> result;
  const std::vector<ParameterSpec> specs = parts.model->parameters();
  const std::vector<SharedInput> inputs =
      declares_numerics(item) ? numerics_of(item).tensor.shared_inputs : std::vector<SharedInput>{};
  const bool fuses_layers = std::any_of(inputs.begin(), inputs.end(), [](const SharedInput& input) {
    return input.fused.has_value();
  });
  const std::vector<FusedLayers> groups =
      fuses_layers ? fused_layers(*parts.model, parts.plan) : std::vector<FusedLayers>{};
  const std::int64_t rows_of_qkv =
      (item.config.num_heads + 2 * item.config.num_kv_heads) * item.config.head_dim;
  for (const ParameterSpec& spec : specs) {
    if (spec.tp.role != TpRole::kColumn || spec.tp.dim < 0) continue;
    const std::int64_t whole = spec.shape[static_cast<std::size_t>(spec.tp.dim)];
    FusedWeight fused;
    std::int64_t begin = 0;
    for (const std::int64_t section : spec.tp.sections) {
      fused.push_back({spec, begin, section});
      begin += section;
    }
    if (fused.empty() && whole == rows_of_qkv && spec.tp.unit > item.config.head_dim)
      fused = {{spec, 0, whole}};
    const std::size_t dot = spec.name.rfind('.');
    for (const FusedLayers& group : groups) {
      if (group.modules.front() != spec.name.substr(0, dot)) continue;
      for (const std::string& module : group.modules) {
        const auto found = std::find_if(specs.begin(), specs.end(), [&](const ParameterSpec& s) {
          return s.name == module + spec.name.substr(dot);
        });
        if (found != specs.end()) fused.push_back({*found, 0, found->shape[0]});
      }
    }
    if (!fused.empty()) result.push_back(std::move(fused));
  }
  return result;
}

/// Reads `count` entries of a fused weight from its entry `from` on; `offset` and `size` say which
/// of the other dims.
at::Tensor read_fused(const WeightSource& weights, const FusedWeight& fused, std::int64_t from,
                      std::int64_t count, Shape offset, Shape size) {
  const auto dim = static_cast<std::size_t>(fused.front().spec.tp.dim);
  std::vector<at::Tensor> pieces;
  std::int64_t before = 0;
  for (const FusedPart& part : fused) {
    const std::int64_t first = std::max(from, before),
                       last = std::min(from + count, before + part.size);
    if (first < last) {
      offset[dim] = part.begin + first - before;
      size[dim] = last - first;
      pieces.push_back(weights.read(part.spec, offset, size));
    }
    before += part.size;
  }
  return pieces.size() == 1 ? pieces.front() : at::cat(pieces, static_cast<std::int64_t>(dim));
}

/// Where a fault reads, counted in the fused weight, instead of entry `local` of the own share of
/// part `part`.
using PlaceOfPiece =
    std::function<std::int64_t(const FusedWeight& fused, std::size_t part, std::int64_t local)>;

/// Reads each piece of a fused weight from another place.
void read_fused_weights_at(const PlaceOfPiece& place, std::vector<FusedWeight> weights,
                           TrainerParts& parts, Mesh& mesh, const FaultProbe& probe) {
  const auto read = [place, fused_weights = std::move(weights), plan = parts.plan,
                     tp_rank = mesh.coordinate(Axis::kTp), shape = mesh.shape(), rank = mesh.rank(),
                     probe](const WeightSource& inner, const ParameterSpec& spec,
                            const Shape& offset, const Shape& size) {
    const auto dim = static_cast<std::size_t>(std::max(spec.tp.dim, 0));
    for (const FusedWeight& fused : fused_weights) {
      for (std::size_t p = 0; p < fused.size(); ++p) {
        const FusedPart& part = fused[p];
        if (part.spec.name != spec.name || offset[dim] < part.begin ||
            offset[dim] >= part.begin + part.size)
          continue;
        for (const Box& box : boxes_of(plan.layout_of(spec, tp_rank), shape, rank)) {
          const std::int64_t local = offset[dim] - box.global_offset[dim];
          if (local < 0 || local >= box.size[dim]) continue;
          const std::int64_t wrong = place(fused, p, local);
          return counted(probe, inner.read(spec, offset, size),
                         read_fused(inner, fused, wrong, size[dim], offset, size));
        }
      }
    }
    return inner.read(spec, offset, size);
  };
  parts.weights = weights_double(parts.weights, read);
}

Fault gate_up_cut_as_one_block() {
  Fault fault{
      .id = "gate_up_cut_as_one_block", .fault_class = 'E', .subjects = {"autotp", "megatron"}};
  fault.summary =
      "The fused gate/up weight was cut in tp pieces as one block; gate and up must each be cut.";
  fault.source = "Megatron-LM #360, PR 520";
  fault.smallest_case = [] { return fault_case("llama", "megatron", {.dp = 3, .tp = 2}); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case& item,
                         const FaultProbe& probe) {
    // What is fused turn by turn, group by group, is cut between groups: there one block is right.
    std::vector<FusedWeight> in_blocks = fused_weights(parts, item);
    std::erase_if(in_blocks, [&](const FusedWeight& fused) {
      return fused.size() < 2 || (fused.size() > 2 && fused[0].spec.name != fused[1].spec.name);
    });
    const int tp_rank = mesh.coordinate(Axis::kTp), tp = mesh.degree(Axis::kTp);
    const auto place = [=](const FusedWeight& fused, std::size_t part, std::int64_t local) {
      std::int64_t whole = 0, before = 0;
      for (std::size_t p = 0; p < fused.size(); ++p) {
        whole += fused[p].size;
        before += p < part ? fused[p].size / tp : 0;
      }
      return tp_rank * (whole / tp) + before + local;
    };
    read_fused_weights_at(place, std::move(in_blocks), parts, mesh, probe);
  };
  fault.expected = {Stage::kParametersRead,
                    "model.layers.0.mlp.gate_proj.weight",
                    {1, 3, 5},
                    {CauseId::kCutAsOneWithOther,
                     {{"axis", "tp"},
                      {"coordinate", 1},
                      {"first", 0},
                      {"last", 47},
                      {"holder", "model.layers.0.mlp.up_proj.weight"}}}};
  return fault;
}

Fault fused_shards_all_from_rank0() {
  Fault fault{
      .id = "fused_shards_all_from_rank0", .fault_class = 'E', .subjects = {"autotp", "megatron"}};
  fault.summary =
      "The loader of fused weights took the tp rank from an argument nobody passed; all ranks "
      "loaded shard 0.";
  fault.source = "vllm-gguf-plugin #103";
  fault.smallest_case = [] { return fault_case("llama", "megatron", {.dp = 2, .tp = 3}); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case& item,
                         const FaultProbe& probe) {
    const auto place = [](const FusedWeight& fused, std::size_t part, std::int64_t local) {
      std::int64_t before = 0;
      for (std::size_t p = 0; p < part; ++p) before += fused[p].size;
      return before + local;
    };
    read_fused_weights_at(place, fused_weights(parts, item), parts, mesh, probe);
  };
  fault.expected = {Stage::kParametersRead,
                    "model.layers.0.self_attn.q_proj.weight",
                    {1, 2, 4, 5},
                    {CauseId::kShardsOfOtherRank,
                     {{"axis", "tp"}, {"coordinate", 0}, {"ranks", std::vector{1, 2, 4, 5}}}}};
  return fault;
}

}  // namespace

Case copied_kv_heads_case() {
  Case item = fault_case("qwen2", "autotp", {.tp = 4});
  item.config.num_heads = 8;
  item.config.num_kv_heads = 2;
  item.config.head_dim = 6;
  item.model_name += "_h8kv2";
  return item;
}

void add_sharding_faults(Faults& faults) {
  for (Fault (*make)() :
       {embed_out_split_without_sp, kv_head_on_wrong_rank, gate_up_cut_as_one_block,
        fused_shards_all_from_rank0, init_seed_plus_rank})
    faults.push_back(make());
}

}  // namespace isoshard
