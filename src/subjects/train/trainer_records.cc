// SPDX-License-Identifier: Apache-2.0
// What a training step records, and where it lies.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/observe/record_name.h"
#include "subjects/train/internal_parts.h"
#include "subjects/train/trainer.h"

namespace isoshard {

at::Tensor detail::as_tensor(std::span<const double> values) {
  return at::tensor(at::ArrayRef<double>(values.data(), values.size()), at::kDouble);
}

// Left out is what is not added up yet, and what only some of the tp ranks hold summands of: no
// layout says that.
void Trainer::record_accumulated(std::optional<std::size_t> stage) const {
  if (sink_ == nullptr) return;
  const DataParallel& data_parallel = *parts_.data_parallel;
  const AccumulatedGradients so_far = data_parallel.accumulated();
  for (const ParameterSpec& spec : trained_) {
    const auto over = parts_.partial_grad_sum == nullptr ? PartialGradSum::Over::kNobody
                                                         : parts_.partial_grad_sum->over(spec.name);
    const auto sum = so_far.gradients.find(spec.name);
    if (over == PartialGradSum::Over::kHolders || sum == so_far.gradients.end()) continue;
    if (stage.has_value() && !parts_.stages->has_parameter(*stage, spec.name)) continue;
    Layout layout = so_far.is_reduced ? data_parallel.piece_layout(spec.name)
                                      : data_parallel.accumulated_layout(spec.name);
    if (!so_far.is_reduced) add_averages(layout);
    if (over == PartialGradSum::Over::kTp)
      layout.placements.push_back(partial(Axis::kTp, Reduction::kSum));
    add_place_on_pp(layout);
    sink_->on_record({RecordKind::kGrad, to_string(RecordName{spec.name, NameRole::kMicroBatch}),
                      std::move(layout), scale_},
                     sum->second.detach());
  }
}

// Each dp rank's part of the mean that backward is of.
void Trainer::record_backward(double sum) const {
  if (sink_ == nullptr) return;
  Layout layout = replicated({1});
  add_averages(layout);
  if (!add_stage(layout)) return;
  sink_->on_record(
      {RecordKind::kScalar, scalar_name(NameRole::kLossBackward), std::move(layout), scale_},
      detail::as_tensor({&sum, 1}));
}

void Trainer::record(RecordKind kind, std::string name, const at::Tensor& value,
                     Layout layout) const {
  if (sink_ == nullptr) return;
  if (kind == RecordKind::kParam || kind == RecordKind::kGrad || kind == RecordKind::kOptimizer)
    add_place_on_pp(layout, name);
  sink_->on_record({kind, std::move(name), std::move(layout), 1.0}, value.detach());
}

// Which ranks of a pipeline have it: also where all do, as two of two stages share a tied
// embedding. `name` is that of a parameter, or of what belongs to one.
void Trainer::add_place_on_pp(Layout& layout, std::string_view name) const {
  if (parts_.stages == nullptr || mesh_->degree(Axis::kPp) == 1) return;
  std::vector<int> holders{mesh_->coordinate(Axis::kPp)};
  for (const ParameterSpec& spec : specs_) {
    if (name == spec.name || name.starts_with(spec.name + "."))
      holders = parts_.stages->readers_of(spec.name);
  }
  layout.placements.push_back(only_at(Axis::kPp, holders));
}

void Trainer::record_parameters() const {
  const DataParallel& data_parallel = *parts_.data_parallel;
  for (const ParameterSpec& spec : specs_) {
    record(RecordKind::kParam, spec.name, data_parallel.held().at(spec.name),
           data_parallel.held_layout(spec.name));
  }
}

void Trainer::record_read(std::string_view name, const at::Tensor& read) const {
  const DataParallel& data_parallel = *parts_.data_parallel;
  if (!read.defined()) return;  // not gathered yet
  record(RecordKind::kParam, to_string(RecordName{name, NameRole::kReadAgain}),
         data_parallel.held_in(name, read), data_parallel.read_layout(name));
}

// As the optimizer gets them.
void Trainer::record_clipped() const {
  if (sink_ == nullptr || parts_.max_grad_norm == 0 || !parts_.records_repetitions) return;
  for (const ParameterSpec& spec : trained_) {
    record(RecordKind::kGrad, to_string(RecordName{spec.name, NameRole::kClipped}),
           gradients_.at(spec.name), parts_.data_parallel->piece_layout(spec.name));
  }
}

void Trainer::record_progress() const {
  const UpdateCounts updates = parts_.optimizer->updates();
  if (!updates.empty()) {
    const auto [fewest, most] =
        std::minmax_element(updates.begin(), updates.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; });
    const double counts[] = {static_cast<double>(fewest->second),
                             static_cast<double>(most->second)};
    record(RecordKind::kScalar, scalar_name(NameRole::kOptimizerSteps), detail::as_tensor(counts),
           replicated({2}));
  }
  if (parts_.streams == nullptr) return;
  // halves, as fp64 does not hold every seed
  const std::uint64_t seed = parts_.streams->seed();
  const double state[] = {static_cast<double>(seed >> 32), static_cast<double>(seed & 0xffffffffU),
                          static_cast<double>(next_step_)};
  record(RecordKind::kScalar, scalar_name(NameRole::kRngState), detail::as_tensor(state),
         replicated({3}));
}

void Trainer::record_data(const TokenBatch& batch) const {
  if (sink_ == nullptr) return;
  const at::Tensor ids = at::tensor(batch.sample_ids, at::kLong);
  record(RecordKind::kDataId, "sample_ids", ids, over_dp(ids));
  record(RecordKind::kDataId, "input_ids", batch.input_ids_BS, over_dp(batch.input_ids_BS));
  record(RecordKind::kDataId, "labels", batch.labels_BS, over_dp(batch.labels_BS));
}

// Each rank's part of an average over dp and cp.
void Trainer::add_averages(Layout& layout) const {
  for (const Axis axis : {Axis::kDp, Axis::kCp}) {
    if (mesh_->degree(axis) > 1) layout.placements.push_back(partial(axis, Reduction::kAvg));
  }
}

// What only the rank with the loss knows.
bool Trainer::add_stage(Layout& layout) const {
  if (parts_.stages == nullptr) return true;
  if (!parts_.stages->has_loss()) return false;
  add_place_on_pp(layout);
  return true;
}

// Dim 0 is split over dp.
Layout Trainer::over_dp(const at::Tensor& local) const {
  Layout layout = replicated(local.sizes().vec());
  if (mesh_->degree(Axis::kDp) > 1) {
    layout.global_shape[0] *= mesh_->degree(Axis::kDp);
    layout.placements.push_back(shard(Axis::kDp, 0));
  }
  return layout;
}

}  // namespace isoshard
