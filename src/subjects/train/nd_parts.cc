// SPDX-License-Identifier: Apache-2.0
// The composition of nd.
#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "subjects/parallel/frozen_weights.h"
#include "subjects/parallel/fsdp/fsdp_shards.h"
#include "subjects/parallel/nd/kept_shards.h"
#include "subjects/parallel/nd/nd_groups.h"
#include "subjects/parallel/nd/nd_strategy.h"
#include "subjects/parallel/nd/pipeline.h"
#include "subjects/parallel/nd/stages.h"
#include "subjects/train/internal_parts.h"
#include "subjects/train/torch_norm.h"

namespace isoshard {
namespace {

// What a rank has: what one of its sections reads, and of that what it counts in a norm.
struct OwnParameters {
  std::vector<ParameterSpec> specs;
  std::set<std::string, std::less<>> counted;
};

OwnParameters own_parameters(const std::vector<ParameterSpec>& specs,
                             const std::vector<ModelSection>& stages, const StageRunner& runner) {
  OwnParameters own;
  const std::vector<ModelSection>& sections = runner.sections();
  for (const ParameterSpec& spec : specs) {
    const auto is_read = [&](const ModelSection& section) { return reads(section, spec); };
    if (std::ranges::none_of(sections, is_read)) continue;
    own.specs.push_back(spec);
    const ModelSection& first = *std::ranges::find_if(stages, is_read);
    if (std::ranges::find(sections, first) != sections.end()) own.counted.insert(spec.name);
  }
  return own;
}

}  // namespace

TrainerParts nd_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan) {
  const NdSettings& settings = config.settings.nd;
  TrainerParts parts = detail::common_parts(config);
  parts.plan = std::move(plan);
  const auto groups = std::make_shared<const NdGroups>(mesh, settings.dp_replicate);
  const ContextSplit context(settings.context_order, mesh.degree(Axis::kCp),
                             mesh.coordinate(Axis::kCp));
  if (context.degree() > 1) parts.token_split = std::make_shared<NdTokenSplit>(context, groups);

  const std::vector<ParameterSpec> specs = parts.model->parameters();
  OwnParameters own{specs, {}};
  const PipelineSpec spec = pipeline_spec(settings, mesh.degree(Axis::kPp));
  if (num_stages(spec) > 1) {
    const std::vector<ModelSection> stages =
        stages_of(parts.model->config().num_layers, num_stages(spec), settings.layers_per_stage);
    parts.stages = std::make_unique<Pipeline>(spec, stages, specs, groups->pipeline());
    own = own_parameters(specs, stages, *parts.stages);
    parts.own_parameters = own.specs;
  }

  const ShardGroups shard_groups{&groups->shards(),
                                 settings.dp_replicate > 1 ? &groups->replicas() : nullptr};
  FsdpShards* gathers = nullptr;
  if (parts.stages != nullptr) {
    parts.data_parallel = std::make_unique<KeptShards>(config.settings.reduce_dtype, shard_groups,
                                                       config.settings.grad_average);
  } else {
    auto shards = std::make_unique<FsdpShards>(config.settings.reduce_dtype, shard_groups,
                                               config.settings.grad_average);
    gathers = shards.get();
    parts.data_parallel = std::move(shards);
  }
  parts.strategy = std::make_shared<NdStrategy>(parts.plan, mesh, groups, config.settings, gathers);
  Communicator& tp = mesh.group(Axis::kTp);
  parts.partial_grad_sum = std::make_unique<PartialGradSum>(
      trained_of(own.specs, config.settings), parts.plan, tp, config.settings.sequence_parallel);
  detail::finish(parts, config, mesh, 1);
  Communicator* const shards = groups->shards().size() > 1 ? &groups->shards() : nullptr;
  if (config.settings.clip_norm == ClipNorm::kTorch) {
    parts.grad_norm = std::make_unique<TorchGradNorm>(trained_of(specs, config.settings), shards);
    return parts;
  }
  NormOverStages stages;
  if (parts.stages != nullptr) stages = {&groups->pipeline(), own.counted};
  parts.grad_norm = std::make_unique<GlobalGradNorm>(trained_of(specs, config.settings), parts.plan,
                                                     tp, shards, std::move(stages));
  return parts;
}

}  // namespace isoshard
