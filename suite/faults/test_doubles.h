// SPDX-License-Identifier: Apache-2.0
/// Test doubles for a trainer's seams. Each one forwards to the part that it replaces, through a
/// function that may change the call.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/comm/communicator.h"
#include "fixtures/cases/case.h"
#include "harness/fault/probe.h"
#include "subjects/train/trainer.h"

namespace isoshard {

using OptimizerStep =
    std::function<void(Optimizer& inner, NamedTensors& parameters, const NamedTensors& gradients)>;
[[nodiscard]] std::unique_ptr<Optimizer> optimizer_double(std::unique_ptr<Optimizer> inner,
                                                          OptimizerStep step);

using NormFunction = std::function<double(GradNorm& inner, const NamedTensors& gradients)>;
[[nodiscard]] std::unique_ptr<GradNorm> grad_norm_double(std::unique_ptr<GradNorm> inner,
                                                         NormFunction norm);

using LossWeights =
    std::function<std::vector<double>(LossNormalizer& inner, std::span<const std::int64_t> counts)>;
[[nodiscard]] std::unique_ptr<LossNormalizer> loss_normalizer_double(
    std::unique_ptr<LossNormalizer> inner, LossWeights weights);

/// The decisions of a schedule. Where a function is empty, the correct schedule decides.
struct ScheduleRules {
  std::function<bool(const MicroBatchPlace&)> clears = {};
  std::function<bool(const MicroBatchPlace&)> reduces = {};
};
[[nodiscard]] std::unique_ptr<Schedule> schedule_double(ScheduleRules rules);

/// The correct schedule, which also sets `place` to the current micro-batch (in this rank's
/// process).
[[nodiscard]] std::unique_ptr<Schedule> place_watcher(std::shared_ptr<MicroBatchPlace> place);
/// Whether gradients are reduced in the backward of every micro-batch, and added up after that
/// (ZeRO 2).
[[nodiscard]] bool reduces_every_micro_batch(const Case& item);

/// Each function gets the inner part, and may be empty. `step` counts from 0.
struct DataParallelRules {
  std::function<void(DataParallel& inner, int step)> clear_gradients = {};
  /// Besides the inner part's: before a micro-batch's forward is given its parameters, and when it
  /// has read them.
  std::function<void(DataParallel&inner, int step)> before_forward = {}, after_forward = {};
};
[[nodiscard]] std::unique_ptr<DataParallel> data_parallel_double(
    std::unique_ptr<DataParallel> inner, DataParallelRules rules);

/// Each function gets the inner part, and may be empty.
struct CheckpointRules {
  std::function<RunProgress(const CheckpointIo& inner, const Checkpoint& checkpoint,
                            const Mesh& mesh)>
      progress = {};
  /// It may read another name than the requested one.
  std::function<void(const CheckpointIo& inner, const Checkpoint& checkpoint, std::string_view name,
                     const Layout& layout, const Mesh& mesh, at::Tensor local)>
      read = {};
};
[[nodiscard]] std::unique_ptr<CheckpointIo> checkpoint_double(std::unique_ptr<CheckpointIo> inner,
                                                              CheckpointRules rules);

using ForwardFunction =
    std::function<at::Tensor(const at::Tensor& input_ids_BS, const Parameters& parameters,
                             const Strategy& strategy, Sink* sink, const TrainingPass& training)>;
/// Everything but the forward pass is the inner model's.
[[nodiscard]] std::shared_ptr<const Model> model_double(std::shared_ptr<const Model> inner,
                                                        ForwardFunction forward);

using ReadFunction = std::function<at::Tensor(const WeightSource& inner, const ParameterSpec& spec,
                                              const Shape& offset, const Shape& size)>;
[[nodiscard]] std::shared_ptr<const WeightSource> weights_double(
    std::shared_ptr<const WeightSource> inner, ReadFunction read);

/// What Strategy::attention gets besides the module.
struct AttentionInputs {
  const at::Tensor &q_BNSD, &k_BKSD, &v_BKSD;
  AttentionImpl impl;
  SoftmaxDtype softmax;
  const AttentionDropout& dropout;
};

/// Each function gets the inner strategy, and may be empty; what the strategy says of layouts is
/// the inner one's.
struct StrategyRules {
  std::function<at::Tensor(const Strategy& inner, std::string_view module, const at::Tensor& x,
                           const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           Sink* sink)>
      linear = {};
  std::function<CrossEntropy(const Strategy& inner, const at::Tensor& logits,
                             const at::Tensor& targets_BS, const at::Tensor& weight_B,
                             double label_smoothing)>
      loss = {};
  /// Of what the model reads; attention has its own.
  std::function<at::Tensor(const Strategy& inner, std::int64_t length)> token_positions = {};
  std::function<at::Tensor(const Strategy& inner, std::string_view module,
                           const AttentionInputs& inputs)>
      attention = {};
};
[[nodiscard]] std::shared_ptr<const Strategy> strategy_double(std::shared_ptr<const Strategy> inner,
                                                              StrategyRules rules);

/// Called before the forward pass of each micro-batch but the first, with its number: what the
/// earlier ones have left in the gradients may be taken away or changed.
using GradientEdit = std::function<void(const Parameters& parameters, int micro_batch)>;
[[nodiscard]] std::shared_ptr<const Model> accumulation_double(std::shared_ptr<const Model> inner,
                                                               int micro_batches,
                                                               GradientEdit edit);

/// Whether a module or parameter is of the last layer, for every architecture's name of its layers
/// ("model.layers.1.", "transformer.h.1.").
[[nodiscard]] bool is_in_last_layer(const Case& item, std::string_view name);
/// The bias of the first row-parallel module with a bias in each layer: attention's, where it has
/// one.
[[nodiscard]] std::set<std::string> first_row_biases(const Case& item);
/// Whether a module is the embedding of tokens.
[[nodiscard]] bool is_token_embedding(std::string_view module);

/// Returns `wrong`, and counts the fault as fired if it differs from `right`.
[[nodiscard]] at::Tensor counted(const FaultProbe& probe, const at::Tensor& right,
                                 at::Tensor wrong);

/// A floating-point buffer as a flat tensor that shares its memory.
[[nodiscard]] at::Tensor tensor_of(const Buffer& buffer);

}  // namespace isoshard
