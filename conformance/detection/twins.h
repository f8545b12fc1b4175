// SPDX-License-Identifier: Apache-2.0
/// Stand-ins for a trainer's seams: each hands on to the part it replaces, through a function that may do otherwise.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "train/trainer.h"

namespace isoshard {

using OptimizerStep = std::function<void(Optimizer& inner, NamedTensors& parameters, const NamedTensors& gradients)>;
[[nodiscard]] std::unique_ptr<Optimizer> optimizer_twin(std::unique_ptr<Optimizer> inner, OptimizerStep step);

using NormFunction = std::function<double(GradNorm& inner, const NamedTensors& gradients)>;
[[nodiscard]] std::unique_ptr<GradNorm> grad_norm_twin(std::unique_ptr<GradNorm> inner, NormFunction norm);

using LossWeights = std::function<std::vector<double>(LossNormaliser& inner, std::span<const std::int64_t> counts)>;
[[nodiscard]] std::unique_ptr<LossNormaliser> loss_normaliser_twin(std::unique_ptr<LossNormaliser> inner, LossWeights weights);

/// Decides like the right schedule where a function is empty.
struct ScheduleRules {
  std::function<bool(const MicroBatchPlace&)> clears = {};
  std::function<bool(const MicroBatchPlace&)> reduces = {};
};
[[nodiscard]] std::unique_ptr<Schedule> schedule_twin(ScheduleRules rules);

using ForwardFunction =
    std::function<at::Tensor(const at::Tensor& input_ids_BS, const Parameters& parameters, const Strategy& strategy, Sink* sink)>;
/// Everything but the forward pass is the inner model's.
[[nodiscard]] std::shared_ptr<const Model> model_twin(std::shared_ptr<const Model> inner, ForwardFunction forward);

/// A floating-point buffer as a flat tensor that shares its memory.
[[nodiscard]] at::Tensor tensor_of(const Buffer& buffer);

}  // namespace isoshard
