// SPDX-License-Identifier: Apache-2.0
/// What a user may choose about a training step, in one struct that every subject takes.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "subjects/optim/learning_rate.h"
#include "subjects/optim/loss_scale.h"
#include "subjects/optim/optimizer.h"

namespace isoshard {

/// kGlobal: mean over the counted tokens of the global batch. kLocal: mean over dp ranks of each
/// rank's own token mean. kSum: no mean, the sum over the counted tokens of the global batch.
/// kMicroBatch: mean over dp ranks and micro-batches of each one's own token mean.
enum class LossMean : std::uint8_t { kGlobal, kLocal, kSum, kMicroBatch };
[[nodiscard]] std::string_view name_of(LossMean mean) noexcept;
[[nodiscard]] LossMean parse_loss_mean(std::string_view name);

/// Where the average of gradients over n dp ranks divides. kInCollective: in the reduction, before
/// its rounding (docs/internals/reduction.md). All others reduce a sum, and scale values in the
/// dtype that is reduced, each time with a rounding: kMultiplyFirst by 1 / n before the sum,
/// kDivideFirst by n before it; kMultiplyLast and kDivideLast the same after it; kDivideAround by
/// about the root of n before it and by the rest after it.
enum class GradAverage : std::uint8_t {
  kInCollective,
  kMultiplyFirst,
  kDivideFirst,
  kMultiplyLast,
  kDivideLast,
  kDivideAround
};
[[nodiscard]] std::string_view name_of(GradAverage average) noexcept;
[[nodiscard]] GradAverage parse_grad_average(std::string_view name);

/// What the norm of all gradients is computed in. kExact: squares and sums in fp64. kTorch: as
/// torch.nn.utils.clip_grad_norm_ has it, norms of parameters in the dtype of gradients, then the
/// norm of these norms.
enum class ClipNorm : std::uint8_t { kExact, kTorch };
[[nodiscard]] std::string_view name_of(ClipNorm norm) noexcept;
[[nodiscard]] ClipNorm parse_clip_norm(std::string_view name);

/// How tokens of a sequence are shared out over cp: in equal parts one after the other, or so that
/// each rank has a part of the head and one of the tail.
enum class ContextOrder : std::uint8_t { kHeadTail, kContiguous };
[[nodiscard]] std::string_view name_of(ContextOrder order) noexcept;
[[nodiscard]] ContextOrder parse_context_order(std::string_view name);

/// How queries meet the keys of other cp ranks.
enum class ContextAttention : std::uint8_t { kAllGather, kRing };
[[nodiscard]] std::string_view name_of(ContextAttention attention) noexcept;
[[nodiscard]] ContextAttention parse_context_attention(std::string_view name);

/// What nd may choose.
struct NdSettings {
  /// Of dp: so many groups have whole copies of the shards (HSDP). dp is a multiple of it.
  int dp_replicate = 1;
  ContextOrder context_order = ContextOrder::kHeadTail;
  ContextAttention context_attention = ContextAttention::kAllGather;
  /// What a ring merges results of blocks in. None: fp32, or fp64 of an fp64 model.
  std::optional<Dtype> ring_merge_dtype;
  std::string pipeline_schedule = "1F1B";
  int stages_per_rank = 1;
  /// "loop" or "v": which rank has which stage. Empty: as the schedule usually has it.
  std::string stage_placement;
  /// The layers of each stage, in order. Empty: nearly equal numbers.
  std::vector<std::int64_t> layers_per_stage;
};

struct TrainSettings {
  OptimizerSettings optimizer;
  /// Of the learning rate; its total_steps must be set for linear and cosine.
  LearningRateSettings schedule;
  double max_grad_norm = 1.0;  ///< 0: no clipping (the norm is recorded all the same)
  LossMean loss_mean = LossMean::kGlobal;
  std::int64_t bucket_bytes = 25 << 20;  ///< ddp's gradient buckets
  /// Record each rank's summand of row-parallel outputs, as "<module>.partial"
  bool record_partials = false;
  /// In [0, 1), Megatron's definition (subjects/model/ops/loss.h).
  double label_smoothing = 0;
  /// bf16 or fp16: forward runs under torch's autocast (subjects/model/ops/autocast.h); parameters,
  /// gradients and optimizer stay fp32.
  std::optional<Dtype> autocast;
  LossScaleSettings loss_scale;  ///< of fp16 only: fp32 masters or autocast
  /// autotp: embedding, head and loss are split along the vocabulary, which is padded to a multiple
  /// of this x tp. 0: whole.
  std::int64_t make_vocab_size_divisible_by = 0;
  /// Of the weights that the optimizer steps, and of its states: fp32 masters of bf16 parameters,
  /// say. None: the parameters' own.
  std::optional<Dtype> master_dtype;
  /// megatron and nd: activations that regions over tp leave whole are split over tp along the
  /// sequence.
  bool sequence_parallel = false;
  /// Megatron: masters and optimizer state are spread over dp, bucket by bucket.
  bool distributed_optimizer = false;
  /// fsdp_tp: what gradients are rounded to before they are averaged over dp. None: the dtype of
  /// the parameters as forward reads them.
  std::optional<Dtype> reduce_dtype;
  /// Of gradients over dp.
  GradAverage grad_average = GradAverage::kInCollective;
  /// ddp, fsdp_tp and nd: of the gradients that are clipped.
  ClipNorm clip_norm = ClipNorm::kExact;
  /// Autotp: what gradients of micro-batches are added up in; they are reduced in the dtype of the
  /// parameters. None: that dtype, too.
  std::optional<Dtype> accumulate_dtype;
  /// fsdp_tp, and its reference: what the model's output is rounded to before the loss. None: it
  /// stays as the head gives it.
  std::optional<Dtype> output_dtype;
  /// Autotp: 0; 1: masters and optimizer state are spread over dp; 2: gradients, too.
  int zero_stage = 0;
  /// Activation checkpointing: of every n-th layer only the input is kept, and its forward is
  /// repeated in backward (subjects/model/zoo/recompute.h). 1: of all layers; 0: of none.
  int recompute_every = 0;
  /// A regular expression (ECMAScript): parameters that it matches from the first letter to the
  /// last are frozen, as with requires_grad off: no gradient, no optimizer state, no part in the
  /// clip norm, no step. Empty: none is.
  std::string freeze;
  NdSettings nd;
};

/// Whether a parameter of this name is frozen by TrainSettings::freeze.
using IsFrozen = std::function<bool(std::string_view parameter)>;
/// Errors   UsageError for a pattern that is no regular expression.
[[nodiscard]] IsFrozen frozen_by(const std::string& pattern);

}  // namespace isoshard
