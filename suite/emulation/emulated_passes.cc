// SPDX-License-Identifier: Apache-2.0
// Forward and backward passes of a step, stage by stage, and its loss.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/observe/record_name.h"
#include "subjects/model/ops/linear_loss.h"
#include "subjects/model/ops/loss.h"
#include "suite/emulation/emulated_autocast.h"
#include "suite/emulation/emulated_loss.h"
#include "suite/emulation/emulated_rank.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {
// Gradients of micro-batches add up one after the other, in the parameters' dtype.
void EmulatedRank::forward_backward(const std::vector<TokenBatch>& batches, int step) {
  Loss loss;
  TrainingPass training{&streams_, step, 0, run_->item.mesh(), rank_, 0, {}};
  const std::size_t num_stages = std::max<std::size_t>(run_->numerics.pipeline.stages.size(), 1);
  std::vector<at::Tensor> targets;
  for (const TokenBatch& batch : batches) {
    targets.push_back(shift_labels(batch.labels_BS));
    for (std::int64_t b = 0; b < targets.back().size(0); ++b) {
      loss.counts.push_back(targets.back()[b].ne(kNotCounted).sum().item<std::int64_t>());
    }
  }
  loss.weights = micro_batch_weights(loss.counts, batches.size());
  for (std::size_t m = 0; m < batches.size(); ++m) {
    record_data(batches[m]);
    std::vector<StagePass> passes(num_stages);
    const at::Tensor logits = forward(batches[m], training, passes);
    training.first_sample += targets[m].size(0) * world_->degree(Axis::kDp);
    MicroLoss micro;
    if (has_loss()) {
      micro = loss_of(logits, strategy_.context().own_tokens(targets[m]).to(run_->device),
                      loss.weights[m] * world_->degree(Axis::kCp));
    } else {
      micro.sample_sum_B = at::zeros({targets[m].size(0)}, at::kDouble);
    }
    for (std::int64_t b = 0; b < targets[m].size(0); ++b)
      loss.sums.push_back(micro.sample_sum_B[b].item<double>());
    if (m + 1 == batches.size()) report_loss(loss);
    is_watching_ = ready_order_.empty() && m + 1 == batches.size();
    backward(micro, passes);
    loss.backward_sum += micro.value * scale();
    add_gradients();
    if (m + 1 < batches.size()) record_accumulated();
  }
  record_backward(loss);
}

bool EmulatedRank::is_own(std::size_t stage) const {
  const PipelineNumerics& pipeline = run_->numerics.pipeline;
  return pipeline.stages.empty() || pipeline.rank_of_stage.at(stage) == coordinate(Axis::kPp);
}

bool EmulatedRank::has_loss() const {
  const PipelineNumerics& pipeline = run_->numerics.pipeline;
  return pipeline.stages.empty() || is_own(pipeline.stages.size() - 1);
}

// What goes to a stage comes to all ranks of the pipeline: nobody's memory is modeled here.
at::Tensor EmulatedRank::over_pp(std::size_t from_stage, const std::string& what,
                                 at::Tensor tensor) {
  const auto giver = static_cast<std::size_t>(run_->numerics.pipeline.rank_of_stage.at(from_stage));
  return world_->from_one(rank_, world_->mesh().group_of(rank_, Axis::kPp), giver, what,
                          std::move(tensor));
}

// One stage after the other; a rank without the last one gets no logits.
at::Tensor EmulatedRank::forward(const TokenBatch& batch, TrainingPass training,
                                 std::vector<StagePass>& passes) {
  const std::vector<ModelSection>& stages = run_->numerics.pipeline.stages;
  const at::Tensor tokens = strategy_.context().own_tokens(batch.input_ids_BS).to(run_->device);
  if (batch.position_ids_BS.defined())
    training.position_ids_BS = strategy_.context().own_tokens(batch.position_ids_BS);
  at::Tensor given;
  for (std::size_t s = 0; s < passes.size(); ++s) {
    if (is_own(s)) {
      if (!stages.empty()) training.section = stages[s];
      passes[s].input = s == 0 ? tokens : given.requires_grad_(true);
      passes[s].result = result_of(passes[s].input, training);
    }
    if (s + 1 == passes.size()) break;
    given = over_pp(s, fmt::format("output of stage {}", s),
                    is_own(s) ? passes[s].result.detach() : at::Tensor());
  }
  return passes.back().result;
}

void EmulatedRank::backward(const MicroLoss& loss, std::vector<StagePass>& passes) {
  at::Tensor gradient = loss.gradient;
  for (std::size_t s = passes.size(); s-- > 0;) {
    if (is_own(s)) {
      const bool is_last = s + 1 == passes.size();
      const at::Tensor& root = is_last ? loss.root : passes[s].result;
      const bool is_scaled_loss = is_last && loss_scale_.has_value() && !gradient.defined();
      root.backward(is_scaled_loss ? at::full_like(root, scale()) : gradient);
    }
    if (s == 0) return;
    gradient = over_pp(s, fmt::format("gradient of stage {}", s),
                       is_own(s) ? passes[s].input.grad() : at::Tensor());
  }
}

at::Tensor EmulatedRank::accumulated_in(const at::Tensor& gradient) const {
  return gradient.to(float_type_of(
      run_->numerics.data.accumulation.dtype.value_or(run_->numerics.precision.dtype)));
}

// After each backward, where the parameters' own gradients are not what is added up.
void EmulatedRank::add_gradients() {
  const NumericsSpec& numerics = run_->numerics;
  if (!numerics.data.accumulation.reduces_every_micro_batch &&
      !numerics.data.accumulation.dtype.has_value())
    return;
  const at::NoGradGuard no_grad;
  for (auto& [name, parameter] : parameters_) {
    if (is_frozen_(name)) continue;
    gradients_[name] = accumulated_in(
        parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter).detach());
    parameter.mutable_grad().reset();
  }
  if (numerics.data.accumulation.reduces_every_micro_batch) reduce_over_dp();
  for (auto& [name, gradient] : gradients_) {
    at::Tensor& sum = added_[name];
    if (!sum.defined() && numerics.data.accumulation.adds_to_zeros)
      sum = at::zeros_like(accumulated_in(gradient));
    sum = sum.defined() ? sum + accumulated_in(gradient) : accumulated_in(gradient);
  }
}

EmulatedRank::MicroLoss EmulatedRank::loss_of(const at::Tensor& logits,
                                              const at::Tensor& targets_BS, double weight) {
  const at::Tensor weight_B =
      fp64_tensor(std::vector<double>(static_cast<std::size_t>(targets_BS.size(0)), weight))
          .to(run_->device);
  const double smoothing = run_->item.settings.label_smoothing;
  const bool is_linear = run_->model.loss_kind() == LossKind::kLinear;
  if (run_->numerics.vocabulary.has_value()) {
    const auto over_tp = [this](std::string_view what, const at::Tensor& own,
                                const ReductionPoint& point) {
      return world_->reduce_over(Axis::kTp, rank_, what, own, point);
    };
    const SplitVocabulary& vocabulary = *run_->numerics.vocabulary;
    const int tp_rank = coordinate(Axis::kTp);
    const at::Tensor scaled_B = weight_B * scale();
    const SplitLoss split = is_linear ? emulated_split_linear_loss(vocabulary, tp_rank, logits,
                                                                   targets_BS, scaled_B, over_tp)
                                      : emulated_split_loss(vocabulary, tp_rank, smoothing, logits,
                                                            targets_BS, scaled_B, over_tp);
    const at::Tensor value =
        (weight_B * split.sample_sum_B)
            .sum()
            .to(is_linear ? at::kDouble : float_type_of(vocabulary.loss_dtype));
    return {logits, split.logits_gradient_BSV, split.sample_sum_B, value.item<double>()};
  }
  LossOptions options;
  options.label_smoothing = smoothing;
  const CrossEntropy entropy = is_linear ? linear_loss(logits, targets_BS, weight_B)
                                         : cross_entropy(logits, targets_BS, weight_B, options);
  return {entropy.loss, {}, entropy.sample_sum_B, entropy.loss.item<double>()};
}

at::Tensor EmulatedRank::result_of(const at::Tensor& input, const TrainingPass& training) {
  const EmulatedAutocast autocast(run_->numerics.precision.products, run_->device.type());
  Sink* sink = scaled_sink_.has_value() ? &*scaled_sink_ : sink_;
  at::Tensor result = run_->model.forward(input, forward_parameters(), strategy_, sink, training);
  const std::optional<Dtype>& dtype = run_->numerics.precision.logits_dtype;
  const bool is_rounded = training.section.has_head && dtype.has_value();
  return is_rounded ? result.to(float_type_of(*dtype)) : result;
}

// Rows by turns: of each turn those of the first module, then of the next.
Parameters EmulatedRank::forward_parameters() const {
  Parameters parameters = parameters_;
  for (const SharedInput& shared : run_->numerics.tensor.shared_inputs) {
    if (!shared.fused.has_value()) continue;
    for (const char* const suffix : {".weight", ".bias"}) {
      if (!parameters_.contains(shared.modules.front() + suffix)) continue;
      std::vector<at::Tensor> parts;
      for (const std::string& module : shared.modules)
        parts.push_back(parameters_.at(module + suffix).unflatten(0, {shared.fused->turns, -1}));
      const at::Tensor all = at::cat(parts, 1).flatten(0, 1);
      for (const std::string& module : shared.modules) parameters[module + suffix] = all;
    }
  }
  return parameters;
}

// What a sample's summed loss is multiplied with, so that averaged gradients are those of the mean
// that the case asks for.
double EmulatedRank::token_weight(const std::vector<std::int64_t>& counts) {
  if (run_->item.settings.loss_mean == LossMean::kSum) return world_->degree(Axis::kDp);
  std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  double numerator = 1;
  if (run_->item.settings.loss_mean == LossMean::kGlobal) {
    const at::Tensor own = at::full({1}, total, at::TensorOptions().dtype(at::kLong));
    total =
        world_
            ->reduce_over(Axis::kDp, rank_, "counted tokens", own, run_->numerics.data.token_count)
            .item<std::int64_t>();
    numerator = world_->degree(Axis::kDp);
  }
  if (total == 0) throw UsageError("no token is counted, so the loss has no mean");
  return numerator / static_cast<double>(total);
}

// All have equally many samples.
std::vector<double> EmulatedRank::micro_batch_weights(const std::vector<std::int64_t>& counts,
                                                      std::size_t num_micro_batches) {
  if (run_->item.settings.loss_mean != LossMean::kMicroBatch)
    return std::vector<double>(num_micro_batches, token_weight(counts));
  std::vector<double> weights;
  const auto size = static_cast<std::ptrdiff_t>(counts.size() / num_micro_batches);
  for (auto first = counts.begin(); first != counts.end(); first += size) {
    const std::int64_t total = std::accumulate(first, first + size, std::int64_t{0});
    if (total == 0) throw UsageError("no token of a micro-batch is counted, so it has no mean");
    weights.push_back(1 / (static_cast<double>(num_micro_batches) * static_cast<double>(total)));
  }
  return weights;
}

void EmulatedRank::report_loss(Loss& loss) {
  if (strategy_.context().is_cut()) {
    const at::Tensor sums = world_->reduce_over(Axis::kCp, rank_, "loss", fp64_tensor(loss.sums),
                                                run_->numerics.context.loss_sums);
    for (std::size_t i = 0; i < loss.sums.size(); ++i)
      loss.sums[i] = sums[static_cast<std::int64_t>(i)].item<double>();
  }
  double weighted = 0, sum = 0;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < loss.sums.size(); ++i) {
    weighted += loss.weights[i * loss.weights.size() / loss.sums.size()] * loss.sums[i];
    sum += loss.sums[i];
    count += loss.counts[i];
  }
  at::Tensor mean = world_->reduce_over(Axis::kDp, rank_, "loss", fp64_tensor({weighted}),
                                        run_->numerics.data.loss);
  if (!run_->numerics.pipeline.stages.empty())
    mean = world_->reduce_over(Axis::kPp, rank_, "loss", mean, ReductionPoint{});
  const at::Tensor own_mean = fp64_tensor({count == 0 ? 0.0 : sum / static_cast<double>(count)});
  Layout of_rank = over_dp(own_mean);
  add_place_on_pp(of_rank);
  if (has_loss())
    record(RecordKind::kScalar, scalar_name(NameRole::kLossPerDpRank), own_mean,
           std::move(of_rank));
  record(RecordKind::kScalar, scalar_name(NameRole::kLoss), mean, replicated({1}));
}

}  // namespace isoshard
