// SPDX-License-Identifier: Apache-2.0
// Composition of trainers.
#include "subjects/train/parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "subjects/parallel/ddp/replicas.h"
#include "subjects/parallel/frozen_weights.h"
#include "subjects/parallel/fsdp/fsdp_shards.h"
#include "subjects/parallel/fsdp/fsdp_strategy.h"
#include "subjects/parallel/megatron/fused_layers.h"
#include "subjects/parallel/megatron/main_gradients.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "subjects/parallel/zero/zero_optimizer_shards.h"
#include "subjects/train/internal_parts.h"
#include "subjects/train/torch_norm.h"

namespace isoshard {
namespace detail {

TrainerParts common_parts(const TrainerConfig& config) {
  TrainerParts parts;
  parts.model = make_model(config.model, config.attention);
  parts.weights = config.weights;
  parts.optimizer = make_optimizer(config.settings.optimizer);
  parts.learning_rate = std::make_unique<LearningRate>(config.settings.optimizer.learning_rate,
                                                       config.settings.schedule);
  parts.streams = std::make_shared<RngStreams>(config.dropout_seed);
  parts.recompute_every = config.settings.recompute_every;
  parts.bucket_bytes = config.settings.bucket_bytes;
  parts.max_grad_norm = config.settings.max_grad_norm;
  parts.label_smoothing = config.settings.label_smoothing;
  if (!config.settings.freeze.empty()) parts.is_frozen = frozen_by(config.settings.freeze);
  parts.dtype = config.dtype;
  parts.master_dtype = config.settings.master_dtype;
  parts.autocast = config.settings.autocast;
  parts.output_dtype = config.settings.output_dtype;
  parts.device = config.device;
  return parts;
}

void finish(TrainerParts& parts, const TrainerConfig& config, Mesh& mesh, int local_groups,
            bool shards_over_dp) {
  parts.num_loss_groups = local_groups;
  if (config.settings.loss_mean == LossMean::kGlobal) {
    parts.loss_normalizer = std::make_unique<GlobalTokenMean>(mesh.group(Axis::kDp));
  } else if (config.settings.loss_mean == LossMean::kSum) {
    parts.loss_normalizer = std::make_unique<GlobalTokenSum>(mesh.degree(Axis::kDp));
  } else if (config.settings.loss_mean == LossMean::kMicroBatch) {
    parts.loss_normalizer =
        std::make_unique<GroupTokenMean>(local_groups * std::max(1, config.micro_batches));
  } else {
    parts.loss_normalizer = std::make_unique<GroupTokenMean>(local_groups);
  }
  if (config.settings.loss_scale.is_on())
    parts.grad_scaler = std::make_unique<GradScaler>(config.settings.loss_scale, mesh.world());
  if (!config.settings.freeze.empty() && !parts.data_parallel->takes_frozen())
    parts.data_parallel = std::make_unique<FrozenBeside>(std::move(parts.data_parallel));
  const bool is_cut = shards_over_dp && mesh.degree(Axis::kDp) > 1;
  if (config.settings.clip_norm == ClipNorm::kTorch) {
    parts.grad_norm =
        std::make_unique<TorchGradNorm>(trained_parameters(*parts.model, config.settings),
                                        is_cut ? &mesh.group(Axis::kDp) : nullptr);
    return;
  }
  parts.grad_norm = std::make_unique<GlobalGradNorm>(
      trained_parameters(*parts.model, config.settings), parts.plan, mesh.group(Axis::kTp),
      is_cut ? &mesh.group(Axis::kDp) : nullptr);
}

}  // namespace detail

using detail::common_parts;
using detail::finish;

TrainerParts plain_parts(const TrainerConfig& config, Mesh& mesh, int dp_groups) {
  if (mesh.shape().world_size() != 1) {
    throw UsageError(fmt::format("the plain reference must run in a world of 1 rank, got {}",
                                 mesh.shape().world_size()));
  }
  TrainerParts parts = common_parts(config);
  parts.strategy = std::make_shared<Strategy>();
  parts.records_repetitions = false;
  parts.data_parallel = std::make_unique<Replicas>(Replicas::Reduces::kNever);
  finish(parts, config, mesh, dp_groups);
  return parts;
}

TrainerParts ddp_parts(const TrainerConfig& config, Mesh& mesh) {
  if (mesh.degree(Axis::kTp) != 1) {
    throw UsageError(
        fmt::format("the tp degree of ddp must be 1, because it holds whole replicas, got {}; take "
                    "another subject, such as autotp",
                    mesh.degree(Axis::kTp)));
  }
  const int dp = mesh.degree(Axis::kDp);
  TrainerParts parts = common_parts(config);
  // Gradients are averaged over dp, so on the way there they are dp times the true ones.
  parts.strategy = std::make_shared<Strategy>(dp, dp);
  parts.data_parallel = std::make_unique<Replicas>(Replicas::Reduces::kOverDpInRebuiltBuckets,
                                                   config.settings.grad_average);
  finish(parts, config, mesh, 1);
  return parts;
}

TrainerParts autotp_parts(const TrainerConfig& config, Mesh& mesh) {
  const auto model = make_model(config.model, config.attention);
  return autotp_parts(
      config, mesh,
      autotp_plan(*model, mesh.degree(Axis::kTp), config.settings.make_vocab_size_divisible_by));
}

TrainerParts autotp_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan) {
  const int dp = mesh.degree(Axis::kDp);
  TrainerParts parts = common_parts(config);
  Communicator& tp = mesh.group(Axis::kTp);
  parts.plan = std::move(plan);
  parts.strategy = std::make_shared<TensorParallelStrategy>(
      parts.plan, tp, dp, dp, config.settings.record_partials, mesh.coordinate(Axis::kDp));
  parts.partial_grad_sum = std::make_unique<PartialGradSum>(
      trained_parameters(*parts.model, config.settings), parts.plan, tp);
  if (config.settings.zero_stage == 0) {
    parts.data_parallel = std::make_unique<Replicas>(
        Replicas::Reduces::kOverDp, config.settings.grad_average, config.settings.accumulate_dtype);
  } else {
    parts.data_parallel = std::make_unique<ZeroOptimizerShards>(
        config.settings.zero_stage, config.settings.grad_average, config.settings.accumulate_dtype);
  }
  finish(parts, config, mesh, 1, config.settings.zero_stage > 0);
  return parts;
}

TrainerParts fsdp_tp_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan) {
  const int dp = mesh.degree(Axis::kDp);
  TrainerParts parts = common_parts(config);
  Communicator& tp = mesh.group(Axis::kTp);
  parts.plan = std::move(plan);
  auto shards = std::make_unique<FsdpShards>(config.settings.reduce_dtype, ShardGroups{},
                                             config.settings.grad_average);
  parts.strategy = std::make_shared<FsdpStrategy>(
      parts.plan, tp, dp, dp, config.settings.record_partials, mesh.coordinate(Axis::kDp), *shards);
  parts.partial_grad_sum = std::make_unique<PartialGradSum>(
      trained_parameters(*parts.model, config.settings), parts.plan, tp);
  parts.data_parallel = std::move(shards);
  finish(parts, config, mesh, 1, /*shards_over_dp=*/true);
  return parts;
}

TrainerParts megatron_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan) {
  const TrainSettings& settings = config.settings;
  if (size_of(config.dtype) < 4 && settings.master_dtype != Dtype::kFloat32) {
    throw UsageError(
        fmt::format("the masters of megatron must be fp32 for parameters in {}; set --master-dtype "
                    "fp32",
                    name_of(config.dtype)));
  }
  const int dp = mesh.degree(Axis::kDp);
  TrainerParts parts = common_parts(config);
  Communicator& tp = mesh.group(Axis::kTp);
  parts.plan = std::move(plan);
  const std::vector<FusedLayers> fused = fused_layers(*parts.model, parts.plan);
  const auto strategy = std::make_shared<TensorParallelStrategy>(
      parts.plan, tp, dp, dp, settings.record_partials, mesh.coordinate(Axis::kDp),
      sequence_split(settings));
  strategy->fuse(fused);
  parts.strategy = strategy;
  parts.partial_grad_sum = std::make_unique<PartialGradSum>(
      trained_parameters(*parts.model, settings), parts.plan, tp, settings.sequence_parallel);
  parts.data_parallel = std::make_unique<MainGradients>(settings.distributed_optimizer
                                                            ? MainGradients::Steps::kDistributed
                                                            : MainGradients::Steps::kEverywhere,
                                                        fused, settings.grad_average);
  finish(parts, config, mesh, 1, settings.distributed_optimizer);
  return parts;
}

}  // namespace isoshard
