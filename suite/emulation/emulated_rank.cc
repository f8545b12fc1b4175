// SPDX-License-Identifier: Apache-2.0
// A training step as its numerics describe it.
#include "suite/emulation/emulated_rank.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "subjects/model/ops/linear_loss.h"
#include "subjects/model/ops/loss.h"
#include "subjects/optim/clip.h"
#include "suite/emulation/emulated_autocast.h"
#include "suite/emulation/emulated_loss.h"
#include "suite/emulation/emulated_parts.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {
namespace {

constexpr std::int64_t kNotCounted = -100;

at::Tensor fp64_tensor(const std::vector<double>& values) {
  return at::tensor(at::ArrayRef<double>(values.data(), values.size()), at::kDouble);
}

double sum_of_blocks(const at::Tensor& gradient, std::int64_t block_size) {
  double sum = 0;
  for (const at::Tensor& block : gradient.reshape({-1}).split(block_size)) {
    const at::Tensor wide = block.to(at::kDouble);
    sum += (wide * wide).sum().item<double>();
  }
  return sum;
}

}  // namespace

EmulatedRank::EmulatedRank(const EmulatedRun& run, EmulatedWorld& world, int rank, Sink& sink)
    : run_(&run),
      world_(&world),
      rank_(rank),
      sink_(&sink),
      strategy_(run.numerics, world, rank, run.item.settings.record_partials),
      streams_(run.item.seed),
      learning_rate_(run.item.settings.optimizer.learning_rate, run.item.learning_rate_schedule()),
      optimizer_(make_optimizer(run.item.settings.optimizer)) {
  if (!run.item.settings.loss_scale.is_on()) return;
  loss_scale_.emplace(run.item.settings.loss_scale);
  scaled_sink_.emplace(sink);
}

EmulatedRank::~EmulatedRank() = default;

void EmulatedRank::setup() {
  sink_->begin_step(std::max(0, run_->item.first_step() - 1));
  for (const ParameterSpec& spec : run_->specs) {
    const at::Tensor& whole = run_->whole_parameters.at(spec.name);
    parameters_[spec.name] =
        part_of(whole, cut_of(run_->numerics.tensor, spec.name), coordinate(Axis::kTp))
            .requires_grad_(true);
  }
  buckets_ = run_->numerics.data.buckets.parameters;
  if (run_->numerics.data.buckets.rebuilt.has_value()) watch_gradients();
  if (run_->item.first_step() > 0) {
    resume();
    record_state();
    record_progress(run_->item.first_step() - 1);
  } else {
    if (run_->resumed != nullptr) resume();
    record_parameters();
  }
}

at::Tensor EmulatedRank::own_piece(const ParameterSpec& spec, const at::Tensor& whole) const {
  return piece_of(spec.name,
                  part_of(whole, cut_of(run_->numerics.tensor, spec.name), coordinate(Axis::kTp)));
}

void EmulatedRank::resume() {
  const at::NoGradGuard no_grad;
  const Checkpoint& checkpoint = *run_->resumed;
  own_parameters();
  NamedTensors state;
  for (const ParameterSpec& spec : run_->specs) {
    if (has_masters()) {
      const at::Tensor stepped =
          checkpoint.read_whole(checkpoint.stepped_name(spec.name)).to(master_type());
      masters_[spec.name] = own_piece(spec, stepped).clone();
    }
    for (const std::string& name : checkpoint.state_names(spec.name)) {
      state[name] = own_piece(spec, checkpoint.read_whole(name).to(master_type())).clone();
    }
  }
  const RunProgress progress = checkpoint.progress(rank_, world_->mesh().world_size());
  optimizer_->restore(state, progress.updates);
  streams_.restore(progress.stream.seed);
  if (loss_scale_.has_value()) loss_scale_->restore(progress.numbers);
}

void EmulatedRank::train_step(int step) {
  // loaded is what was saved
  if (run_->item.reload_after != 0 && step == run_->item.reload_after) {
    record_state();
    record_progress(step - 1);
  }
  if (step > 0) sink_->begin_step(step);
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
  begin_scaling();
  const std::vector<TokenBatch> batches = run_->data.rank_batches(step, coordinate(Axis::kDp));
  forward_backward(batches, step);

  const at::NoGradGuard no_grad;
  reduce_gradients();
  const bool is_skipped = unscale();
  for (const ParameterSpec& spec : run_->specs)
    record(RecordKind::kGrad, spec.name, gradients_.at(spec.name), piece_layout(spec));
  if (loss_scale_.has_value())
    record(RecordKind::kScalar, "found_inf", fp64_tensor({is_skipped ? 1.0 : 0.0}),
           replicated({1}));
  const double norm = gradient_norm();
  record(RecordKind::kScalar, "grad_norm", fp64_tensor({norm}), replicated({1}));
  if (!is_skipped)
    scale_gradients(gradients_, clip_factor(norm, run_->item.settings.max_grad_norm));
  if (step == 0 && run_->resumed == nullptr) {
    own_parameters();
    make_masters();
  }
  const double rate = learning_rate_.at(step);
  record(RecordKind::kScalar, "learning_rate", fp64_tensor({rate}), replicated({1}));
  optimizer_->set_learning_rate(rate);
  if (!is_skipped) {
    for (const ParameterSpec& spec : run_->specs) {
      if (run_->item.settings.max_grad_norm == 0) break;
      record(RecordKind::kGrad, spec.name + ".clipped", gradients_.at(spec.name),
             piece_layout(spec));
    }
    optimizer_->step(has_masters() ? masters_ : parameters_, gradients_);
    publish();
  }
  record_state();
  record_progress(step);
}

// The fewest and the most updates of a parameter, and where the masks stand.
void EmulatedRank::record_progress(int step) {
  double fewest = 0, most = 0;
  const UpdateCounts updates = optimizer_->updates();
  for (auto entry = updates.begin(); entry != updates.end(); ++entry) {
    const auto count = static_cast<double>(entry->second);
    fewest = entry == updates.begin() ? count : std::min(fewest, count);
    most = std::max(most, count);
  }
  if (!updates.empty())
    record(RecordKind::kScalar, "optimizer_steps", fp64_tensor({fewest, most}), replicated({2}));
  const std::uint64_t seed = streams_.seed();
  record(RecordKind::kScalar, "rng_state",
         fp64_tensor({static_cast<double>(seed / (std::uint64_t{1} << 32)),
                      static_cast<double>(seed % (std::uint64_t{1} << 32)), step + 1.0}),
         replicated({3}));
}

void EmulatedRank::record_backward(const Loss& loss) {
  Layout layout = replicated({1});
  if (world_->degree(Axis::kDp) > 1)
    layout.placements.push_back(partial(Axis::kDp, Reduction::kAvg));
  sink_->on_record({RecordKind::kScalar, "loss_backward", std::move(layout), scale()},
                   fp64_tensor({loss.backward_sum}));
}

void EmulatedRank::begin_scaling() {
  if (!loss_scale_.has_value()) return;
  record(RecordKind::kScalar, "loss_scale", fp64_tensor({scale()}), replicated({1}));
  scaled_sink_->set_scale(scale());
}

bool EmulatedRank::unscale() {
  if (!loss_scale_.has_value()) return false;
  bool own = false;
  for (auto& [name, gradient] : gradients_) {
    // inf - inf and NaN - NaN are NaN
    own = own || gradient.sub(gradient).ne(0).any().item<bool>();
    gradient = gradient.mul(static_cast<double>(static_cast<float>(1 / scale())));
  }
  std::vector<int> everybody(static_cast<std::size_t>(world_->mesh().world_size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  ReductionPoint point;
  point.reduction = Reduction::kMax;
  const bool found =
      world_->reduce(rank_, everybody, "found inf", fp64_tensor({own ? 1.0 : 0.0}), point)
          .item<double>() != 0;
  loss_scale_->update(found);
  return found;
}

std::optional<std::vector<Range>> EmulatedRank::own_runs(std::string_view parameter) const {
  const auto runs = run_->numerics.data.sharding.stepped_runs.find(parameter);
  if (runs == run_->numerics.data.sharding.stepped_runs.end()) return std::nullopt;
  return runs->second.at(static_cast<std::size_t>(coordinate(Axis::kDp)));
}

at::Tensor EmulatedRank::piece_of(std::string_view parameter, const at::Tensor& part) const {
  const std::optional<std::vector<Range>> runs = own_runs(parameter);
  if (!runs.has_value() || (runs->size() == 1 && runs->front().count == part.numel())) return part;
  const at::Tensor flat = part.reshape({-1});
  if (runs->size() == 1) return flat.narrow(0, runs->front().begin, runs->front().count);
  std::vector<at::Tensor> pieces{flat.narrow(0, 0, 0)};
  for (const Range& run : *runs) pieces.push_back(flat.narrow(0, run.begin, run.count));
  return at::cat(pieces);
}

at::ScalarType EmulatedRank::master_type() const {
  return float_type_of(
      run_->numerics.precision.master_dtype.value_or(run_->numerics.precision.dtype));
}

bool EmulatedRank::has_masters() const {
  return run_->numerics.precision.master_dtype.has_value() ||
         !run_->numerics.data.sharding.stepped_runs.empty();
}

void EmulatedRank::make_masters() {
  if (!has_masters()) return;
  for (const auto& [name, gradient] : gradients_)
    masters_[name] = piece_of(name, parameters_.at(name).detach()).to(master_type()).clone();
}

// Every rank's forward reads all stepped pieces.
void EmulatedRank::publish() {
  if (!has_masters()) return;
  for (const ParameterSpec& spec : run_->specs) {
    at::Tensor& parameter = parameters_.at(spec.name);
    at::Tensor own = masters_.at(spec.name).to(parameter.scalar_type());
    if (own_runs(spec.name).has_value())
      own = world_->gather_over(Axis::kDp, rank_, spec.name, own);
    parameter.copy_(own.view(parameter.sizes()));
  }
}

void EmulatedRank::own_parameters() {
  for (const ParameterSpec& spec : run_->specs) {
    at::Tensor& parameter = parameters_.at(spec.name);
    if (cut_of(run_->numerics.tensor, spec.name) == nullptr)
      parameter = parameter.detach().clone().requires_grad_(true);
  }
}

// Gradients of micro-batches add up one after the other, in the parameters' dtype.
void EmulatedRank::forward_backward(const std::vector<TokenBatch>& batches, int step) {
  Loss loss;
  TrainingPass training{&streams_, step, 0, run_->item.mesh(), rank_};
  std::vector<at::Tensor> targets;
  for (const TokenBatch& batch : batches) {
    targets.push_back(shift_labels(batch.labels_BS));
    for (std::int64_t b = 0; b < targets.back().size(0); ++b) {
      loss.counts.push_back(targets.back()[b].ne(kNotCounted).sum().item<std::int64_t>());
    }
  }
  loss.weight = token_weight(loss.counts);
  for (std::size_t m = 0; m < batches.size(); ++m) {
    record_data(batches[m]);
    const MicroLoss micro = loss_of(logits_of(batches[m], training), targets[m], loss.weight);
    training.first_sample += targets[m].size(0) * world_->degree(Axis::kDp);
    for (std::int64_t b = 0; b < targets[m].size(0); ++b)
      loss.sums.push_back(micro.sample_sum_B[b].item<double>());
    if (m + 1 == batches.size()) report_loss(loss);
    is_watching_ = ready_order_.empty() && m + 1 == batches.size();
    const bool is_scaled_loss = loss_scale_.has_value() && !micro.gradient.defined();
    micro.root.backward(is_scaled_loss ? at::full_like(micro.root, scale()) : micro.gradient);
    loss.backward_sum += micro.value * scale();
    add_gradients();
    if (m + 1 < batches.size()) record_accumulated();
  }
  record_backward(loss);
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
      fp64_tensor(std::vector<double>(static_cast<std::size_t>(targets_BS.size(0)), weight));
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

at::Tensor EmulatedRank::logits_of(const TokenBatch& batch, const TrainingPass& training) {
  const EmulatedAutocast autocast(run_->numerics.precision.products);
  Sink* sink = scaled_sink_.has_value() ? &*scaled_sink_ : sink_;
  at::Tensor logits =
      run_->model.forward(batch.input_ids_BS, forward_parameters(), strategy_, sink, training);
  const std::optional<Dtype>& dtype = run_->numerics.precision.logits_dtype;
  return dtype.has_value() ? logits.to(float_type_of(*dtype)) : logits;
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

void EmulatedRank::report_loss(const Loss& loss) {
  double weighted = 0, sum = 0;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < loss.sums.size(); ++i) {
    weighted += loss.weight * loss.sums[i];
    sum += loss.sums[i];
    count += loss.counts[i];
  }
  const at::Tensor mean = world_->reduce_over(Axis::kDp, rank_, "loss", fp64_tensor({weighted}),
                                              run_->numerics.data.loss);
  const at::Tensor own_mean = fp64_tensor({count == 0 ? 0.0 : sum / static_cast<double>(count)});
  record(RecordKind::kScalar, "loss_per_dp_rank", own_mean, over_dp(own_mean));
  record(RecordKind::kScalar, "loss", mean, replicated({1}));
}

void EmulatedRank::reduce_gradients() {
  const NumericsSpec& numerics = run_->numerics;
  if (added_.empty()) {
    for (auto& [name, parameter] : parameters_) {
      gradients_[name] =
          parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter).detach();
      parameter.mutable_grad().reset();  // the sums take its place
    }
  } else {
    gradients_ = std::exchange(added_, {});
  }
  if (!numerics.data.accumulation.reduces_every_micro_batch) reduce_over_dp();
  for (auto& [name, gradient] : gradients_) gradient = gradient.to(master_type());
  for (const std::vector<std::string>& names : run_->numerics.tensor.holder_sums) {
    const std::vector<int> holders = holders_of(names);
    reduce_flat(names, nullptr, [&](at::Tensor flat) {
      return world_->reduce(rank_, holders, names.front(), std::move(flat),
                            run_->numerics.tensor.holder_gradient);
    });
  }
}

double EmulatedRank::gradient_norm() {
  std::vector<double> squares, cut_squares;
  for (const ParameterSpec& spec : run_->specs) {
    squares.push_back(sum_of_blocks(gradients_.at(spec.name), run_->numerics.norm.block));
  }
  if (!run_->numerics.data.sharding.stepped_runs.empty()) {
    const at::Tensor sums = world_->reduce_over(Axis::kDp, rank_, "clip norm", fp64_tensor(squares),
                                                run_->numerics.norm.square_sums);
    for (std::size_t i = 0; i < squares.size(); ++i)
      squares[i] = sums[static_cast<std::int64_t>(i)].item<double>();
  }
  for (std::size_t i = 0; i < run_->specs.size(); ++i) {
    const ParameterCut* cut = cut_of(run_->numerics.tensor, run_->specs[i].name);
    if (cut != nullptr)
      cut_squares.push_back(is_first_holder(*cut, coordinate(Axis::kTp)) ? squares[i] : 0.0);
  }
  if (!cut_squares.empty()) {
    const at::Tensor sums = world_->reduce_over(
        Axis::kTp, rank_, "clip norm", fp64_tensor(cut_squares), run_->numerics.norm.square_sums);
    std::int64_t next = 0;
    for (std::size_t i = 0; i < run_->specs.size(); ++i) {
      if (cut_of(run_->numerics.tensor, run_->specs[i].name) != nullptr)
        squares[i] = sums[next++].item<double>();
    }
  }
  double total = 0;
  if (run_->numerics.norm.adds == NormAdds::kModelOrder) {
    for (const double square : squares) total += square;
  } else {
    for (auto square = squares.rbegin(); square != squares.rend(); ++square) total += *square;
  }
  return std::sqrt(total);
}

}  // namespace isoshard
