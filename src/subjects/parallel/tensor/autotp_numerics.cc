// SPDX-License-Identifier: Apache-2.0
// The numerics of autotp, read off its plan.
#include "subjects/parallel/tensor/autotp_numerics.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/parallel/ddp/ddp_numerics.h"
#include "subjects/parallel/frozen_weights.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/parallel/zero/partition.h"

namespace isoshard {
namespace {

std::string_view before_last_dot(std::string_view path) {
  return path.substr(0, std::min(path.rfind('.'), path.size()));
}

Region region_of(ShardKind kind) {
  switch (kind) {
    case ShardKind::kColumn:
    case ShardKind::kKvReplica:
      return Region::kColumn;
    case ShardKind::kRow:
      return Region::kRow;
    case ShardKind::kVocabEmbedding:
      return Region::kVocabEmbedding;
    case ShardKind::kVocabHead:
      return Region::kVocabHead;
    case ShardKind::kReplicated:
      break;
  }
  return Region::kReplicated;
}

ParameterCut cut_of(const ShardPlan& plan, const ParameterSpec& spec, int tp) {
  const MeshShape mesh({{Axis::kTp, tp}});
  ParameterCut cut;
  cut.dim = plan.sharded_dim(spec);
  const auto dim = static_cast<std::size_t>(cut.dim);
  for (int rank = 0; rank < tp; ++rank) {
    std::vector<Range>& ranges = cut.by_rank.emplace_back();
    for (const Box& box : boxes_of(plan.layout_of(spec, rank), mesh, rank))
      ranges.push_back({box.global_offset[dim], box.size[dim]});
  }
  if (is_vocab(plan.kind_of(spec.name))) cut.padded_size = plan.vocab_rows_per_rank;
  return cut;
}

// Column modules of one block (equal parent) read one input, in model order; backward reaches the
// last one first. Not so in the lattice model: its values read the residual stream, its queries and
// keys the embedding.
void add_column_module(std::vector<SharedInput>& groups, const std::string& module,
                       bool is_lattice) {
  const bool joins = !groups.empty() &&
                     before_last_dot(groups.back().modules.back()) == before_last_dot(module) &&
                     !(is_lattice && module.ends_with(".v_proj"));
  if (!joins) groups.emplace_back();
  groups.back().adds.insert(groups.back().adds.begin(), groups.back().modules.size());
  groups.back().modules.push_back(module);
}

// What k_proj and v_proj give, and what is made of it head by head.
void add_copied_points(CopiedActivations& copies, const std::string& module) {
  copies.points.push_back(module);
  if (!module.ends_with(".k_proj")) return;
  const std::string attention(before_last_dot(module));
  for (const std::string_view point : {"k_norm", "k_rope"})
    copies.points.push_back(fmt::format("{}.{}", attention, point));
}

// The head reads the last norm's output alone; a tied one has no parameter of its own.
void split_vocabulary(NumericsSpec& numerics, const ShardPlan& plan, const std::string& head,
                      const NumericsInputs& inputs) {
  numerics.tensor.regions[head] = Region::kVocabHead;
  numerics.tensor.shared_inputs.push_back({{head}, {0}});
  SplitVocabulary& vocabulary = numerics.vocabulary.emplace();
  vocabulary.size = plan.vocab_size;
  for (int rank = 0; rank < inputs.mesh.degree(Axis::kTp); ++rank) {
    const VocabShard shard = plan.vocab_shard(rank);
    vocabulary.by_rank.push_back({shard.begin, shard.count});
  }
  vocabulary.loss_dtype = inputs.settings.output_dtype.value_or(inputs.dtype) == Dtype::kFloat64
                              ? Dtype::kFloat64
                              : Dtype::kFloat32;
  vocabulary.largest_logit.reduction = Reduction::kMax;
  for (ReductionPoint* point :
       {&vocabulary.embedding_output, &vocabulary.head_input_gradient, &vocabulary.largest_logit,
        &vocabulary.sum_of_exponentials, &vocabulary.target_logit, &vocabulary.sum_of_logits}) {
    point->order = inputs.order;
  }
}

void add_zero(NumericsSpec& numerics, const std::vector<ParameterSpec>& specs,
              const NumericsInputs& inputs) {
  std::vector<std::int64_t> numels;
  for (const ParameterSpec& spec : specs)
    numels.push_back(numel_of(held_shape(numerics.tensor, spec)));
  const int dp = numerics.mesh.degree(Axis::kDp);
  const ZeroPartition partition = zero_partition(numels, dp);
  for (std::size_t i = 0; i < specs.size(); ++i)
    numerics.data.sharding.places_in_buffer[specs[i].name] = partition.offsets[i];
  if (dp == 1) return;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    std::vector<std::vector<Range>>& runs = numerics.data.sharding.stepped_runs[specs[i].name];
    for (const Range& run : partition.runs[i]) runs.push_back({run});
  }
  if (inputs.settings.zero_stage < 2) return;
  numerics.data.sharding.reduces_to_owner = numerics.data.accumulation.reduces_every_micro_batch =
      true;
  numerics.data.buckets.parameters.clear();
  const auto element = static_cast<std::int64_t>(size_of(inputs.dtype));
  for (const std::vector<std::size_t>& bucket :
       zero_buckets(numels, std::max<std::int64_t>(inputs.settings.bucket_bytes / element, 1))) {
    std::vector<std::string>& names = numerics.data.buckets.parameters.emplace_back();
    for (const std::size_t i : bucket) names.push_back(specs[i].name);
  }
}

// Whole on every tp rank and used token by token: with a cut sequence each rank has a summand of
// the gradient.
void cut_sequence(NumericsSpec& numerics, const std::vector<ParameterSpec>& specs) {
  numerics.sequence.is_cut = true;
  std::vector<std::string> used_by_token;
  for (const ParameterSpec& spec : specs) {
    const ParamClass c = spec.param_class;
    if (c == ParamClass::kNorm || c == ParamClass::kRowBias || c == ParamClass::kPosition)
      used_by_token.push_back(spec.name);
  }
  if (!used_by_token.empty()) numerics.tensor.holder_sums.push_back(std::move(used_by_token));
}

// Frozen weights have no gradient to add.
void sum_trained_only(NumericsSpec& numerics, const TrainSettings& settings) {
  const IsFrozen is_frozen = frozen_by(settings.freeze);
  for (std::vector<std::string>& names : numerics.tensor.holder_sums)
    std::erase_if(names, is_frozen);
  std::erase_if(numerics.tensor.holder_sums,
                [](const std::vector<std::string>& names) { return names.empty(); });
}

}  // namespace

NumericsSpec autotp_numerics(const Model& model, const NumericsInputs& inputs) {
  return autotp_numerics(model, inputs,
                         autotp_plan(model, inputs.mesh.degree(Axis::kTp),
                                     inputs.settings.make_vocab_size_divisible_by));
}

NumericsSpec autotp_numerics(const Model& model, const NumericsInputs& inputs,
                             const ShardPlan& plan) {
  const std::vector<ParameterSpec> specs = model.parameters();
  const int tp = inputs.mesh.degree(Axis::kTp);
  const bool is_lattice = model.config().model_type == "lattice";
  NumericsSpec numerics;
  std::vector<std::string> held_alike, head_norms;
  for (const ParameterSpec& spec : specs) {
    const ShardKind kind = plan.kind_of(spec.name);
    if (plan.sharded_dim(spec) >= 0) numerics.tensor.cuts[spec.name] = cut_of(plan, spec, tp);
    if (kind == ShardKind::kKvReplica) held_alike.push_back(spec.name);
    if (plan.class_of(spec) == ParamClass::kQkNorm && tp > 1) head_norms.push_back(spec.name);
    if (!spec.name.ends_with(".weight") || region_of(kind) == Region::kReplicated) continue;
    const std::string module(before_last_dot(spec.name));
    numerics.tensor.regions[module] = region_of(kind);
    if (region_of(kind) == Region::kColumn)
      add_column_module(numerics.tensor.shared_inputs, module, is_lattice);
    if (kind == ShardKind::kKvReplica) add_copied_points(numerics.tensor.copies, module);
  }
  if (!held_alike.empty()) {
    numerics.tensor.copies.num_parts = plan.num_kv_heads;
    numerics.tensor.copies.part_of_rank = plan.kv_head_of_rank;
    numerics.tensor.holder_sums.push_back(std::move(held_alike));
  }
  if (!head_norms.empty()) numerics.tensor.holder_sums.push_back(std::move(head_norms));
  if (inputs.settings.sequence_parallel && tp > 1) cut_sequence(numerics, specs);
  sum_trained_only(numerics, inputs.settings);
  if (plan.vocab_size != 0) split_vocabulary(numerics, plan, model.head_module(), inputs);
  const std::vector<ParameterSpec> trained = trained_of(specs, inputs.settings);
  add_data_parallelism(numerics, trained, inputs);
  if (inputs.settings.zero_stage > 0) add_zero(numerics, trained, inputs);
  return numerics;
}

}  // namespace isoshard
