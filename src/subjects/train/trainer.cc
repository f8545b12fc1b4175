// SPDX-License-Identifier: Apache-2.0
// The phases of a training step.
#include "subjects/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "core/observe/record_name.h"
#include "subjects/model/ops/autocast.h"
#include "subjects/model/ops/linear_loss.h"
#include "subjects/model/ops/loss.h"
#include "subjects/optim/clip.h"
#include "subjects/train/internal_parts.h"

namespace isoshard {
namespace {

// The rank's own part of a parameter. Its boxes tile it: fused sections follow each other.
at::Tensor read_own_part(at::ScalarType type, const WeightSource& weights,
                         const ParameterSpec& spec, const Layout& layout, const Mesh& mesh) {
  const std::vector<Box> boxes = boxes_of(layout, mesh.shape(), mesh.rank());
  if (boxes.size() == 1) return weights.read_as(type, spec, boxes[0].global_offset, boxes[0].size);
  Shape shape(spec.shape.size(), 0);
  for (const Box& box : boxes) {
    for (std::size_t d = 0; d < shape.size(); ++d)
      shape[d] = std::max(shape[d], box.local_offset[d] + box.size[d]);
  }
  at::Tensor part;
  for (const Box& box : boxes) {
    const at::Tensor read = weights.read_as(type, spec, box.global_offset, box.size);
    if (!part.defined()) part = at::empty(shape, read.options());
    at::Tensor place = part;
    for (std::size_t d = 0; d < shape.size(); ++d)
      place = place.narrow(static_cast<std::int64_t>(d), box.local_offset[d], box.size[d]);
    place.copy_(read);
  }
  return part;
}

std::vector<std::int64_t> counts_of(const at::Tensor& targets_BS) {
  const at::Tensor counts = targets_BS.ne(kNotCounted).sum(1);
  const auto* data = counts.const_data_ptr<std::int64_t>();
  return {data, data + counts.numel()};
}

// Which columns of the vocabulary this rank's logits have.
LossOptions vocabulary_of(const ShardPlan& plan, Mesh& mesh) {
  LossOptions options;
  if (plan.vocab_size == 0) return options;
  options.tp = &mesh.group(Axis::kTp);
  options.shard = plan.vocab_shard(mesh.coordinate(Axis::kTp));
  return options;
}

}  // namespace

Trainer::Trainer(TrainerParts parts, Mesh& mesh, Sink* sink)
    : parts_(std::move(parts)),
      mesh_(&mesh),
      sink_(sink),
      specs_(parts_.own_parameters.value_or(parts_.model->parameters())),
      trained_(specs_) {
  if (parts_.is_frozen)
    std::erase_if(trained_, [&](const ParameterSpec& spec) { return parts_.is_frozen(spec.name); });
}

Trainer::~Trainer() = default;

void Trainer::setup() {
  if (sink_ != nullptr) sink_->begin_step(0);
  set_up_parameters();
  record_parameters();
}

void Trainer::set_up_parameters() {
  DataParallelSetup setup;
  for (const ParameterSpec& spec : specs_) {
    const bool is_trained = !parts_.is_frozen || !parts_.is_frozen(spec.name);
    setup.parameters.push_back({spec.name, parts_.plan.class_of(spec), layout_of(spec),
                                own_part(spec, scalar_type_of(parts_.dtype))
                                    .to(parts_.device)
                                    .requires_grad_(is_trained)});
  }
  setup.mesh = mesh_;
  setup.bucket_bytes = parts_.bucket_bytes;
  setup.master_dtype = parts_.master_dtype;
  setup.on_read = [this](std::string_view name, const at::Tensor& read) {
    if (is_reading_) record_read(name, read);
  };
  parts_.data_parallel->setup(std::move(setup));
}

at::Tensor Trainer::own_part(const ParameterSpec& spec, at::ScalarType type) const {
  const Layout layout = layout_of(spec);
  if (!is_vocab(parts_.plan.kind_of(spec.name)))
    return read_own_part(type, *parts_.weights, spec, layout, *mesh_);
  const bool all_padding = layout.boxes.empty();
  const at::Tensor rows = all_padding ? at::zeros({0, spec.shape[1]}, type)
                                      : read_own_part(type, *parts_.weights, spec, layout, *mesh_);
  return at::constant_pad_nd(rows, {0, 0, 0, parts_.plan.vocab_rows_per_rank - rows.size(0)});
}

void Trainer::forward_backward(std::span<const TokenBatch> micro_batches) {
  if (micro_batches.empty())
    throw UsageError("a step must have at least one micro-batch, got none");
  if (sink_ != nullptr && next_step_ > 0) sink_->begin_step(next_step_);
  MicroBatchPlace place{next_step_++, 0, static_cast<int>(micro_batches.size())};
  gradients_.clear();
  begin_scaling();

  std::vector<at::Tensor> targets;
  for (const TokenBatch& batch : micro_batches) targets.push_back(shift_labels(batch.labels_BS));
  LossSums sums = weigh(targets);
  std::vector<MicroBatch> own(micro_batches.size());
  std::int64_t earlier_samples = 0;
  for (std::size_t m = 0; m < own.size(); ++m) {
    own[m] = {&micro_batches[m], targets[m], earlier_samples};
    earlier_samples += targets[m].size(0);
  }
  backward_sum_ = 0;
  if (parts_.stages != nullptr) {
    run_stages(own, place, sums);
  } else {
    for (std::size_t m = 0; m < own.size(); ++m) {
      place.index = static_cast<int>(m);
      run_micro_batch(place, own[m], sums);
    }
  }
  record_backward(backward_sum_);
}

at::Tensor Trainer::own_tokens(const at::Tensor& whole_BS) const {
  return parts_.token_split == nullptr ? whole_BS : parts_.token_split->own_tokens(whole_BS);
}

at::Tensor Trainer::own_tokens_on_device(const at::Tensor& whole_BS) const {
  return own_tokens(whole_BS).to(parts_.device);
}

at::Tensor Trainer::seed_of(const at::Tensor& loss) const {
  return parts_.grad_scaler == nullptr ? at::ones_like(loss)
                                       : at::full_like(loss, parts_.grad_scaler->scale());
}

void Trainer::run_micro_batch(MicroBatchPlace place, MicroBatch& micro_batch, LossSums& sums) {
  const auto m = static_cast<std::size_t>(place.index);
  if (parts_.schedule->clears_gradients_before(place)) parts_.data_parallel->clear_gradients();
  record_data(*micro_batch.batch);
  is_reading_ = sink_ != nullptr && parts_.records_repetitions && m == 0 && place.step > 0;
  const at::Tensor logits =
      logits_of(*micro_batch.batch, pass_sink(), training_pass(place.step, micro_batch));
  is_reading_ = false;
  const at::Tensor loss =
      loss_of(logits, own_tokens_on_device(micro_batch.targets_BS), sums.places[m], sums);
  if (place.is_last()) report_loss(sums);
  const bool reduces = parts_.schedule->reduces_gradients_in(place);
  parts_.data_parallel->before_backward(reduces);
  const at::Tensor seed = seed_of(loss);
  backward_sum_ += loss.item<double>() * seed.item<double>();
  loss.backward(seed);
  parts_.data_parallel->after_backward(reduces, place.is_last());
  if (!place.is_last()) record_accumulated();
}

void Trainer::begin_scaling() {
  found_inf_ = false;
  if (parts_.grad_scaler == nullptr) return;
  scale_ = parts_.grad_scaler->scale();
  record(RecordKind::kScalar, scalar_name(NameRole::kLossScale), detail::as_tensor({&scale_, 1}),
         replicated({1}));
  if (sink_ == nullptr) return;
  if (!scaled_sink_.has_value()) scaled_sink_.emplace(*sink_);
  scaled_sink_->set_scale(scale_);
}

Trainer::LossSums Trainer::weigh(std::span<const at::Tensor> targets) const {
  LossSums sums;
  sums.places.resize(targets.size());
  std::vector<std::vector<std::int64_t>> counts;
  for (const at::Tensor& targets_BS : targets) counts.push_back(counts_of(targets_BS));
  const auto num_groups = static_cast<std::size_t>(parts_.num_loss_groups);
  for (std::size_t group = 0; group < num_groups; ++group) {
    for (std::size_t m = 0; m < counts.size(); ++m) {
      if (parts_.takes_turns && m % num_groups != group) continue;
      const std::size_t num_sharers = parts_.takes_turns ? 1 : num_groups;
      if (counts[m].size() % num_sharers != 0) {
        throw UsageError(fmt::format(
            "the samples of micro-batch {} must be divisible by the {} dp ranks, got {}", m,
            num_groups, counts[m].size()));
      }
      const std::size_t size = counts[m].size() / num_sharers;
      const std::size_t first = parts_.takes_turns ? 0 : group * size;
      for (std::size_t i = first; i < first + size; ++i) {
        sums.places[m].push_back(sums.counts.size());
        sums.counts.push_back(counts[m][i]);
      }
    }
  }
  sums.weights = parts_.loss_normalizer->weights(sums.counts);
  sums.sums.resize(sums.counts.size());
  return sums;
}

double Trainer::evaluate(std::span<const TokenBatch> micro_batches) {
  if (micro_batches.empty())
    throw UsageError("an evaluation must have at least one micro-batch, got none");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> targets;
  for (const TokenBatch& batch : micro_batches) targets.push_back(shift_labels(batch.labels_BS));
  LossSums sums = weigh(targets);
  if (parts_.stages != nullptr) {
    evaluate_stages(micro_batches, targets, sums);
  } else {
    for (std::size_t m = 0; m < micro_batches.size(); ++m) {
      const TokenBatch& batch = micro_batches[m];
      (void)loss_of(logits_of(batch, nullptr, evaluation_pass(batch)),
                    own_tokens_on_device(targets[m]), sums.places[m], sums);
    }
  }
  add_shared_tokens(sums);
  return mean_loss(sums);
}

// Samples of a step are numbered as its global batches have them: micro-batch by micro-batch, in
// each one dp rank after the other.
TrainingPass Trainer::training_pass(int step, const MicroBatch& micro_batch) const {
  TrainingPass pass = evaluation_pass(*micro_batch.batch);
  if (!is_training_) return pass;
  pass.streams = parts_.streams.get();
  pass.step = step;
  pass.first_sample = micro_batch.earlier_samples * mesh_->degree(Axis::kDp);
  pass.mesh = mesh_->shape();
  pass.rank = mesh_->rank();
  pass.recompute_every = parts_.recompute_every;
  return pass;
}

TrainingPass Trainer::evaluation_pass(const TokenBatch& batch) const {
  TrainingPass pass;
  if (batch.position_ids_BS.defined()) pass.position_ids_BS = own_tokens(batch.position_ids_BS);
  return pass;
}

at::Tensor Trainer::logits_of(const TokenBatch& batch, Sink* sink, const TrainingPass& training) {
  return result_of(own_tokens_on_device(batch.input_ids_BS), sink, training);
}

at::Tensor Trainer::result_of(const at::Tensor& input, Sink* sink, const TrainingPass& training) {
  const Parameters& parameters = parts_.data_parallel->before_forward();
  if (is_reading_) {
    for (const auto& [name, read] : parameters) record_read(name, read);
  }
  std::optional<AutocastScope> autocast;
  if (parts_.autocast.has_value())
    autocast.emplace(input.device().type(), scalar_type_of(*parts_.autocast));
  at::Tensor result = parts_.model->forward(input, parameters, *parts_.strategy, sink, training);
  const bool is_rounded = training.section.has_head && parts_.output_dtype.has_value();
  return is_rounded ? result.to(scalar_type_of(*parts_.output_dtype)) : result;
}

at::Tensor Trainer::loss_of(const at::Tensor& logits, const at::Tensor& targets_BS,
                            std::span<const std::size_t> places, LossSums& sums) const {
  std::vector<double> weights;
  // gradients are averaged over the ranks that share the tokens, too
  const int sharers = parts_.token_split == nullptr ? 1 : parts_.token_split->degree();
  for (const std::size_t place : places) weights.push_back(sums.weights[place] * sharers);
  const at::Tensor weight_B = detail::as_tensor(weights).to(parts_.device);
  CrossEntropy loss =
      parts_.model->loss_kind() == LossKind::kLinear
          ? linear_loss(logits, targets_BS, weight_B, vocabulary_of(parts_.plan, *mesh_))
          : parts_.strategy->loss(logits, targets_BS, weight_B, parts_.label_smoothing);
  const at::Tensor sample_sums = loss.sample_sum_B.to(at::kCPU, at::kDouble).contiguous();
  for (std::size_t i = 0; i < places.size(); ++i)
    sums.sums[places[i]] = sample_sums.const_data_ptr<double>()[i];
  return std::move(loss.loss);
}

double Trainer::mean_loss(const LossSums& sums) const {
  double loss = 0;
  for (std::size_t i = 0; i < sums.sums.size(); ++i) loss += sums.weights[i] * sums.sums[i];
  const Buffer buffer{reinterpret_cast<std::byte*>(&loss), 1, Dtype::kFloat64};
  mesh_->group(Axis::kDp)
      .all_reduce(buffer, Reduction::kAvg, {Purpose::kLossReduce, Axis::kDp, {}})
      .wait();
  if (parts_.stages != nullptr) {
    parts_.stages->group()
        .all_reduce(buffer, Reduction::kSum, {Purpose::kLossReduce, Axis::kPp, {}})
        .wait();
  }
  return loss;
}

// Sums over the tokens of the ranks that share them.
void Trainer::add_shared_tokens(LossSums& sums) const {
  if (parts_.token_split == nullptr) return;
  const Buffer buffer{reinterpret_cast<std::byte*>(sums.sums.data()),
                      static_cast<std::int64_t>(sums.sums.size()), Dtype::kFloat64};
  parts_.token_split->sharers()
      .all_reduce(buffer, Reduction::kSum, {Purpose::kLossReduce, Axis::kCp, {}})
      .wait();
}

void Trainer::report_loss(LossSums& sums) {
  add_shared_tokens(sums);
  loss_ = mean_loss(sums);
  const std::vector<double> means = group_means(sums.sums, sums.counts, parts_.num_loss_groups);
  const at::Tensor per_rank = detail::as_tensor(means);
  Layout of_rank = over_dp(per_rank);
  if (add_stage(of_rank))
    record(RecordKind::kScalar, scalar_name(NameRole::kLossPerDpRank), per_rank,
           std::move(of_rank));
  record(RecordKind::kScalar, scalar_name(NameRole::kLoss), detail::as_tensor({&loss_, 1}),
         replicated({1}));
}

void Trainer::reduce_gradients() {
  parts_.data_parallel->finish();
  gradients_ = parts_.data_parallel->gradients();
  if (parts_.partial_grad_sum != nullptr) parts_.partial_grad_sum->reduce(gradients_);
  if (parts_.stages != nullptr) parts_.stages->add_shared(gradients_);
  if (parts_.grad_scaler != nullptr)
    found_inf_ = parts_.grad_scaler->found_on_any_rank(parts_.grad_scaler->unscale(gradients_));
  for (const ParameterSpec& spec : trained_) {
    record(RecordKind::kGrad, spec.name, gradients_.at(spec.name),
           parts_.data_parallel->piece_layout(spec.name));
  }
  const double flag = found_inf_ ? 1 : 0;
  if (parts_.grad_scaler != nullptr)
    record(RecordKind::kScalar, scalar_name(NameRole::kFoundInf), detail::as_tensor({&flag, 1}),
           replicated({1}));
}

void Trainer::clip() {
  const at::NoGradGuard no_grad;
  grad_norm_ = parts_.grad_norm->norm(gradients_);
  record(RecordKind::kScalar, scalar_name(NameRole::kGradNorm), detail::as_tensor({&grad_norm_, 1}),
         replicated({1}));
  if (found_inf_) return;
  scale_gradients(gradients_, parts_.grad_norm->factor(grad_norm_, parts_.max_grad_norm));
}

void Trainer::step() {
  const at::NoGradGuard no_grad;
  const double rate = parts_.learning_rate->at(next_step_ - 1);
  record(RecordKind::kScalar, scalar_name(NameRole::kLearningRate), detail::as_tensor({&rate, 1}),
         replicated({1}));
  parts_.optimizer->set_learning_rate(rate);
  if (parts_.grad_scaler != nullptr) parts_.grad_scaler->update(found_inf_);
  if (found_inf_) return;
  record_clipped();
  parts_.optimizer->step(parts_.data_parallel->masters(), gradients_);
  parts_.data_parallel->publish();
}

void Trainer::state() {
  if (sink_ == nullptr) return;
  const NamedTensors state = parts_.optimizer->state();
  const NamedTensors& masters = parts_.data_parallel->masters();
  const bool own_masters = parts_.master_dtype.has_value();
  for (const ParameterSpec& spec : trained_) {
    const at::Tensor& master = masters.at(spec.name);
    const Layout layout = parts_.data_parallel->piece_layout(spec.name);
    if (own_masters)
      record(RecordKind::kOptimizer, to_string(RecordName{spec.name, NameRole::kMaster}), master,
             layout);
    const std::string prefix = spec.name + ".";
    for (auto it = state.lower_bound(prefix); it != state.end() && it->first.starts_with(prefix);
         ++it) {
      const bool like_parameter = it->second.sizes() == master.sizes();
      record(RecordKind::kOptimizer, it->first, it->second,
             like_parameter ? layout : replicated(it->second.sizes().vec()));
    }
  }
  record_parameters();
  record_progress();
}

void Trainer::train_step(std::span<const TokenBatch> micro_batches) {
  forward_backward(micro_batches);
  reduce_gradients();
  clip();
  step();
  state();
}

}  // namespace isoshard
