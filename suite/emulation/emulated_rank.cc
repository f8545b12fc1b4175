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
#include "core/observe/record_name.h"
#include "subjects/optim/clip.h"
#include "suite/emulation/emulated_parts.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {
namespace {

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
      is_frozen_(frozen_by(run.item.settings.freeze)),
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
  find_own_specs();
  for (const ParameterSpec& spec : specs_) {
    const at::Tensor& whole = run_->whole_parameters.at(spec.name);
    parameters_[spec.name] =
        part_of(whole, cut_of(run_->numerics.tensor, spec.name), coordinate(Axis::kTp))
            .requires_grad_(!is_frozen_(spec.name));
    watch_gradient(spec.name);
  }
  place_parameters();
  make_first_buckets();
  if (run_->item.first_step() > 0) {
    resume();
    record_state();
    record_progress(run_->item.first_step() - 1);
  } else {
    if (run_->resumed != nullptr) resume();
    record_parameters();
  }
}

void EmulatedRank::place_parameters() {
  const auto& places = run_->numerics.data.sharding.places_in_buffer;
  if (places.empty()) return;
  const at::NoGradGuard no_grad;
  std::int64_t numel = 0;
  for (const auto& [name, place] : places)
    numel = std::max(numel, place + parameters_.at(name).numel());
  const at::Tensor buffer =
      at::zeros({numel}, parameters_.at(places.begin()->first).options().requires_grad(false));
  for (const auto& [name, place] : places) {
    at::Tensor& parameter = parameters_.at(name);
    at::Tensor placed = buffer.narrow(0, place, parameter.numel()).view(parameter.sizes());
    placed.copy_(parameter);
    parameter = placed.detach().requires_grad_(parameter.requires_grad());
  }
}

void EmulatedRank::make_first_buckets() {
  buckets_.clear();
  for (const std::vector<std::string>& names : run_->numerics.data.buckets.parameters) {
    std::vector<std::string> own;
    for (const std::string& name : names) {
      if (parameters_.contains(name)) own.push_back(name);
    }
    if (!own.empty()) buckets_.push_back(std::move(own));
  }
  ready_order_.clear();
  is_rebuilt_ = false;
}

// Those that one of its stages reads. Of a parameter that several ranks read the first counts.
void EmulatedRank::find_own_specs() {
  const PipelineNumerics& pipeline = run_->numerics.pipeline;
  const auto is_here = [&](int stage) { return is_own(static_cast<std::size_t>(stage)); };
  for (const ParameterSpec& spec : run_->specs) {
    if (pipeline.stages.empty()) {
      specs_.push_back(spec);
      counted_.insert(spec.name);
      continue;
    }
    const std::vector<int>& readers = pipeline.readers.at(spec.name);
    if (std::any_of(readers.begin(), readers.end(), is_here)) specs_.push_back(spec);
    if (is_here(readers.front())) counted_.insert(spec.name);
  }
  trained_ = specs_;
  std::erase_if(trained_, [&](const ParameterSpec& spec) { return is_frozen_(spec.name); });
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
  for (const ParameterSpec& spec : trained_) {
    if (has_masters()) {
      const at::Tensor stepped =
          checkpoint.read_whole(checkpoint.stepped_name(spec.name)).to(run_->device, master_type());
      masters_[spec.name] = own_piece(spec, stepped).clone();
    }
    for (const std::string& name : checkpoint.state_names(spec.name)) {
      state[name] =
          own_piece(spec, checkpoint.read_whole(name).to(run_->device, master_type())).clone();
    }
  }
  RunProgress progress = checkpoint.progress(rank_, world_->mesh().world_size());
  std::erase_if(progress.updates, [&](const auto& update) { return is_frozen_(update.first); });
  optimizer_->restore(state, progress.updates);
  streams_.restore(progress.stream.seed);
  if (loss_scale_.has_value()) loss_scale_->restore(progress.numbers);
}

void EmulatedRank::train_step(int step) {
  // loaded is what was saved, by a subject that reduces for the first time
  if (run_->item.reload_after != 0 && step == run_->item.reload_after) {
    make_first_buckets();
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
  for (const ParameterSpec& spec : trained_)
    record(RecordKind::kGrad, spec.name, gradients_.at(spec.name), piece_layout(spec));
  if (loss_scale_.has_value())
    record(RecordKind::kScalar, scalar_name(NameRole::kFoundInf),
           fp64_tensor({is_skipped ? 1.0 : 0.0}), replicated({1}));
  const double norm = gradient_norm();
  record(RecordKind::kScalar, scalar_name(NameRole::kGradNorm), fp64_tensor({norm}),
         replicated({1}));
  if (!is_skipped) scale_gradients(gradients_, factor_of(norm));
  if (step == 0 && run_->resumed == nullptr) {
    own_parameters();
    make_masters();
  }
  const double rate = learning_rate_.at(step);
  record(RecordKind::kScalar, scalar_name(NameRole::kLearningRate), fp64_tensor({rate}),
         replicated({1}));
  optimizer_->set_learning_rate(rate);
  if (!is_skipped) {
    for (const ParameterSpec& spec : trained_) {
      if (run_->item.settings.max_grad_norm == 0) break;
      record(RecordKind::kGrad, to_string(RecordName{spec.name, NameRole::kClipped}),
             gradients_.at(spec.name), piece_layout(spec));
    }
    if (has_masters()) {
      optimizer_->step(masters_, gradients_);
    } else {
      NamedTensors stepped = parameters_;
      std::erase_if(stepped, [&](const auto& entry) { return is_frozen_(entry.first); });
      optimizer_->step(stepped, gradients_);
    }
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
    record(RecordKind::kScalar, scalar_name(NameRole::kOptimizerSteps), fp64_tensor({fewest, most}),
           replicated({2}));
  const std::uint64_t seed = streams_.seed();
  record(RecordKind::kScalar, scalar_name(NameRole::kRngState),
         fp64_tensor({static_cast<double>(seed / (std::uint64_t{1} << 32)),
                      static_cast<double>(seed % (std::uint64_t{1} << 32)), step + 1.0}),
         replicated({3}));
}

void EmulatedRank::record_backward(const Loss& loss) {
  if (!has_loss()) return;
  Layout layout = replicated({1});
  add_averages(layout);
  add_place_on_pp(layout);
  sink_->on_record(
      {RecordKind::kScalar, scalar_name(NameRole::kLossBackward), std::move(layout), scale()},
      fp64_tensor({loss.backward_sum}));
}

void EmulatedRank::begin_scaling() {
  if (!loss_scale_.has_value()) return;
  record(RecordKind::kScalar, scalar_name(NameRole::kLossScale), fp64_tensor({scale()}),
         replicated({1}));
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
  return runs->second.at(shard_rank());
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
  for (const ParameterSpec& spec : trained_) {
    at::Tensor& parameter = parameters_.at(spec.name);
    at::Tensor own = masters_.at(spec.name).to(parameter.scalar_type());
    if (own_runs(spec.name).has_value())
      own = world_->gather(rank_, shard_members(), spec.name, own);
    parameter.copy_(own.view(parameter.sizes()));
  }
}

void EmulatedRank::own_parameters() {
  for (const ParameterSpec& spec : specs_) {
    at::Tensor& parameter = parameters_.at(spec.name);
    if (cut_of(run_->numerics.tensor, spec.name) != nullptr ||
        run_->numerics.data.sharding.places_in_buffer.contains(spec.name))
      continue;
    parameter = parameter.detach().clone().requires_grad_(!is_frozen_(spec.name));
    watch_gradient(spec.name);
  }
}

void EmulatedRank::reduce_gradients() {
  const NumericsSpec& numerics = run_->numerics;
  if (added_.empty()) {
    for (auto& [name, parameter] : parameters_) {
      if (is_frozen_(name)) continue;
      gradients_[name] =
          parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter).detach();
      parameter.mutable_grad().reset();  // the sums take its place
    }
  } else {
    gradients_ = std::exchange(added_, {});
  }
  if (!numerics.data.accumulation.reduces_every_micro_batch) reduce_over_dp();
  for (auto& [name, gradient] : gradients_) gradient = gradient.to(master_type());
  for (std::vector<std::string> names : run_->numerics.tensor.holder_sums) {
    // other stages have the others
    std::erase_if(names, [&](const std::string& name) { return !gradients_.contains(name); });
    if (names.empty()) continue;
    const std::vector<int> holders = holders_of(names);
    reduce_flat(names, nullptr, [&](at::Tensor flat) {
      return world_->reduce(rank_, holders, names.front(), std::move(flat),
                            run_->numerics.tensor.holder_gradient);
    });
  }
  for (const auto& [name, readers] : run_->numerics.pipeline.readers) {
    if (readers.size() > 1 && !is_frozen_(name)) add_shared(name, readers);
  }
}

// All ranks meet, those that do not read it as well.
void EmulatedRank::add_shared(const std::string& name, const std::vector<int>& readers) {
  at::Tensor sum;
  for (const int reader : readers) {
    const auto stage = static_cast<std::size_t>(reader);
    const at::Tensor given = over_pp(stage, fmt::format("gradient of {} in stage {}", name, stage),
                                     is_own(stage) ? gradients_.at(name) : at::Tensor());
    sum = sum.defined() ? sum + given : given;
  }
  if (parameters_.contains(name)) gradients_.at(name) = sum;
}

double EmulatedRank::gradient_norm() {
  if (run_->numerics.norm.is_torchs) return torchs_norm();
  std::vector<double> squares, cut_squares;
  std::vector<ParameterSpec> specs = run_->specs;
  std::erase_if(specs, [&](const ParameterSpec& spec) { return is_frozen_(spec.name); });
  for (const ParameterSpec& spec : specs) {
    squares.push_back(counted_.contains(spec.name)
                          ? sum_of_blocks(gradients_.at(spec.name), run_->numerics.norm.block)
                          : 0.0);
  }
  if (!run_->numerics.data.sharding.stepped_runs.empty()) {
    const at::Tensor sums = world_->reduce(rank_, shard_members(), "clip norm",
                                           fp64_tensor(squares), run_->numerics.norm.square_sums);
    for (std::size_t i = 0; i < squares.size(); ++i)
      squares[i] = sums[static_cast<std::int64_t>(i)].item<double>();
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const ParameterCut* cut = cut_of(run_->numerics.tensor, specs[i].name);
    if (cut != nullptr)
      cut_squares.push_back(is_first_holder(*cut, coordinate(Axis::kTp)) ? squares[i] : 0.0);
  }
  if (!cut_squares.empty()) {
    const at::Tensor sums = world_->reduce_over(
        Axis::kTp, rank_, "clip norm", fp64_tensor(cut_squares), run_->numerics.norm.square_sums);
    std::int64_t next = 0;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (cut_of(run_->numerics.tensor, specs[i].name) != nullptr)
        squares[i] = sums[next++].item<double>();
    }
  }
  if (!run_->numerics.pipeline.stages.empty()) {
    const at::Tensor sums =
        world_->reduce_over(Axis::kPp, rank_, "clip norm", fp64_tensor(squares), ReductionPoint{});
    for (std::size_t i = 0; i < squares.size(); ++i)
      squares[i] = sums[static_cast<std::int64_t>(i)].item<double>();
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
