// SPDX-License-Identifier: Apache-2.0
// The numerics of nd, axis by axis.
#include "subjects/parallel/nd/nd_numerics.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/observe/layer_name.h"
#include "subjects/parallel/ddp/ddp_numerics.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/parallel/grad_average.h"
#include "subjects/parallel/nd/stages.h"
#include "subjects/parallel/tensor/autotp_numerics.h"

namespace isoshard {
namespace {

ContextNumerics over_cp(const NumericsInputs& inputs) {
  const NdSettings& settings = inputs.settings.nd;
  const int cp = inputs.mesh.degree(Axis::kCp);
  ContextNumerics context;
  context.keys_gradient.order = context.loss_sums.order = inputs.order;
  if (cp == 1) return context;
  const bool is_balanced = settings.context_order == ContextOrder::kHeadTail;
  context.num_chunks = is_balanced ? 2 * cp : cp;
  for (int rank = 0; rank < cp; ++rank) {
    std::vector<int>& chunks = context.chunks_of_rank.emplace_back(1, rank);
    if (is_balanced) chunks.push_back(2 * cp - 1 - rank);
  }
  if (settings.context_attention == ContextAttention::kRing)
    context.ring = RingNumerics{settings.ring_merge_dtype};
  return context;
}

PipelineNumerics over_pp(const Model& model, const NumericsInputs& inputs) {
  const NdSettings& settings = inputs.settings.nd;
  const PipelineSpec spec = pipeline_spec(settings, inputs.mesh.degree(Axis::kPp));
  PipelineNumerics pipeline;
  if (num_stages(spec) == 1) return pipeline;
  pipeline.stages =
      stages_of(model.config().num_layers, num_stages(spec), settings.layers_per_stage);
  for (int stage = 0; stage < num_stages(spec); ++stage)
    pipeline.rank_of_stage.push_back(rank_of_stage(spec, stage));
  for (const ParameterSpec& parameter : model.parameters()) {
    for (std::size_t stage = 0; stage < pipeline.stages.size(); ++stage) {
      if (reads(pipeline.stages[stage], parameter))
        pipeline.readers[parameter.name].push_back(static_cast<int>(stage));
    }
  }
  return pipeline;
}

}  // namespace

NumericsSpec nd_numerics(const Model& model, const NumericsInputs& inputs) {
  const int replicas = inputs.settings.nd.dp_replicate;
  const int shards = inputs.mesh.degree(Axis::kDp) / replicas * inputs.mesh.degree(Axis::kCp);
  NumericsSpec numerics = autotp_numerics(model, inputs);
  numerics.context = over_cp(inputs);
  numerics.pipeline = over_pp(model, inputs);
  numerics.precision.logits_dtype = inputs.settings.output_dtype;

  DataNumerics& data = numerics.data;
  data.sharding.groups = {replicas, true};
  std::map<std::string, std::vector<std::string>, std::less<>> groups;
  const IsFrozen is_frozen = frozen_by(inputs.settings.freeze);
  for (const ParameterSpec& spec : model.parameters()) {
    if (!is_frozen(spec.name)) groups[std::string(layer_of(spec.name))].push_back(spec.name);
    if (shards * replicas == 1) continue;
    for (const Range& rows : dim0_shards(held_shape(numerics.tensor, spec), shards).elements)
      data.sharding.stepped_runs[spec.name].push_back({rows});
  }
  data.buckets.parameters.clear();
  for (auto& [module, names] : groups) data.buckets.parameters.push_back(std::move(names));
  data.parameter_gradient.dtype = inputs.settings.reduce_dtype.value_or(inputs.dtype);
  AveragedReduction(inputs.settings.grad_average, shards).declare(data.parameter_gradient);
  data.replica_gradient.reduction = Reduction::kAvg;
  data.replica_gradient.order = inputs.order;
  data.accumulation.reduces_every_micro_batch = numerics.pipeline.stages.empty();
  data.accumulation.dtype = numerics.pipeline.stages.empty() ? inputs.settings.master_dtype
                                                             : data.parameter_gradient.dtype;
  data.sharding.reduces_to_owner = shards * replicas > 1;
  data.sharding.keeps_runs = shards > 1;
  return numerics;
}

}  // namespace isoshard
