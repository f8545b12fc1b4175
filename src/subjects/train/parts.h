// SPDX-License-Identifier: Apache-2.0
/// The parts that make a Trainer the plain reference, DDP, AutoTP, FSDP2 or Megatron-Core on a dp x
/// tp mesh.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "subjects/model/config/config.h"
#include "subjects/train/trainer.h"

namespace isoshard {

/// What all of them need.
struct TrainerConfig {
  ModelConfig model;
  AttentionImpl attention = AttentionImpl::kEager;
  Dtype dtype = Dtype::kFloat32;
  TrainSettings settings;
  std::shared_ptr<const WeightSource> weights;
  std::uint64_t dropout_seed = 0;
  int micro_batches = 1;  ///< of a step, for LossMean::kMicroBatch
  /// Of the plain reference: how many dp ranks' batches its own batch stands for.
  int num_loss_groups = 1;
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< TrainerParts::device
};

/// Nothing sharded, nothing reduced: the trusted single process, whose batch stands for the batches
/// of `dp_groups` ranks.
/// Errors   UsageError unless the mesh is a world of one.
[[nodiscard]] TrainerParts plain_parts(const TrainerConfig& config, Mesh& mesh, int dp_groups);

/// Replicas whose gradients are averaged over dp.   Errors   UsageError if the mesh has a tp degree
/// above 1.
[[nodiscard]] TrainerParts ddp_parts(const TrainerConfig& config, Mesh& mesh);

/// Linear layers split over tp by autotp_plan, gradients averaged over dp only.   Errors   as
/// check_autotp_degree.
[[nodiscard]] TrainerParts autotp_parts(const TrainerConfig& config, Mesh& mesh);
/// The same by a plan given from outside.
[[nodiscard]] TrainerParts autotp_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan);

/// Linear layers as autotp's, every parameter's part sharded over dp by rows and gathered layer by
/// layer.   Errors   as autotp_parts.
[[nodiscard]] TrainerParts fsdp_tp_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan);

/// Layers and vocabulary split over tp by `plan` (megatron_plan), the sequence between them too if
/// the settings say so; main gradients over dp, with or without the distributed optimizer.
/// Errors   UsageError for 16-bit parameters without masters in fp32, which upstream always has.
[[nodiscard]] TrainerParts megatron_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan);

/// Stages over pp, tokens over cp, layers over tp by `plan`, parameters sharded over dp x cp and
/// copied over dp_replicate (NdSettings).
/// Errors   UsageError for degrees that do not fit the model, the batch, or each other.
[[nodiscard]] TrainerParts nd_parts(const TrainerConfig& config, Mesh& mesh, ShardPlan plan);

}  // namespace isoshard
