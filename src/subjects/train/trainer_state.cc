// SPDX-License-Identifier: Apache-2.0
// What a trainer saves, and how it resumes from it.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/comm/tensor.h"
#include "core/observe/record_name.h"
#include "subjects/train/trainer.h"

namespace isoshard {
namespace {

/// Elements [begin, begin + count) of the flattened `shape`, as boxes in their order; the first
/// dims are fixed by `box`.
void add_boxes(const Shape& shape, std::size_t dim, Box box, std::int64_t begin, std::int64_t count,
               std::vector<Box>& boxes) {
  std::int64_t stride = 1;
  for (std::size_t d = dim + 1; d < shape.size(); ++d) stride *= shape[d];
  while (count > 0) {
    box.global_offset[dim] = begin / stride;
    const std::int64_t inside = begin % stride;
    std::int64_t taken = 0;
    if (inside == 0 && count >= stride) {
      box.size[dim] = count / stride;
      taken = box.size[dim] * stride;
      boxes.push_back(box);
    } else {
      Box row = box;
      row.size[dim] = 1;
      taken = std::min(count, stride - inside);
      add_boxes(shape, dim + 1, std::move(row), inside, taken, boxes);
    }
    begin += taken;
    count -= taken;
  }
}

/// A run of the flattened parameter.
at::Tensor read_run(const WeightSource& weights, at::ScalarType type, const ParameterSpec& spec,
                    std::int64_t begin, std::int64_t count) {
  std::vector<Box> boxes;
  add_boxes(spec.shape, 0, {{}, Shape(spec.shape.size(), 0), spec.shape}, begin, count, boxes);
  std::vector<at::Tensor> parts;
  for (const Box& box : boxes)
    parts.push_back(weights.read_as(type, spec, box.global_offset, box.size).reshape({-1}));
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

at::Tensor in_host_memory(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU);
}

/// State that belongs to a parameter: "<parameter>.<state>".
std::vector<std::pair<std::string, at::Tensor>> state_of(const NamedTensors& state,
                                                         const std::string& parameter) {
  std::vector<std::pair<std::string, at::Tensor>> own;
  const std::string prefix = parameter + ".";
  for (auto it = state.lower_bound(prefix); it != state.end() && it->first.starts_with(prefix);
       ++it)
    own.emplace_back(it->first, it->second);
  return own;
}

}  // namespace

void Trainer::save(const std::filesystem::path& folder) const {
  const at::NoGradGuard no_grad;
  RunProgress progress;
  progress.stream = {parts_.streams == nullptr ? 0 : parts_.streams->seed(), next_step_,
                     is_training_};
  progress.rule = parts_.optimizer->rule();
  progress.training = parts_.training;
  progress.updates = parts_.optimizer->updates();
  if (parts_.grad_scaler != nullptr) progress.numbers = parts_.grad_scaler->numbers();

  DataParallel& data_parallel = *parts_.data_parallel;
  const NamedTensors state = parts_.optimizer->state();
  std::vector<SavedPart> saved;
  for (const ParameterSpec& spec : specs_) {
    saved.push_back({spec.name, SavedKind::kParameter, data_parallel.held_layout(spec.name),
                     in_host_memory(data_parallel.held().at(spec.name))});
  }
  for (const ParameterSpec& spec : trained_) {
    const Layout layout = data_parallel.piece_layout(spec.name);
    const at::Tensor& master = data_parallel.masters().at(spec.name);
    if (parts_.master_dtype.has_value())
      saved.push_back({to_string(RecordName{spec.name, NameRole::kMaster}), SavedKind::kMaster,
                       layout, in_host_memory(master)});
    for (const auto& [name, tensor] : state_of(state, spec.name)) {
      const bool like_parameter = tensor.sizes() == master.sizes();
      saved.push_back({name, SavedKind::kOptimizer,
                       like_parameter ? layout : replicated(tensor.sizes().vec()),
                       in_host_memory(tensor)});
    }
  }
  parts_.checkpoint_io->write(folder, progress, saved, *mesh_);
}

void Trainer::resume(const std::filesystem::path& folder) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  checkpoint.require_fits(parts_.model->parameters(), parts_.optimizer->rule(), parts_.is_frozen);
  RunProgress progress = parts_.checkpoint_io->progress(checkpoint, *mesh_);
  set_up_parameters();
  restore_masters();
  std::erase_if(progress.updates, [this](const auto& update) {  // of other stages, or frozen now
    return std::ranges::find(trained_, update.first, &ParameterSpec::name) == trained_.end();
  });
  parts_.optimizer->restore(read_state(checkpoint), progress.updates);
  if (parts_.streams != nullptr) parts_.streams->restore(progress.stream.seed);
  if (parts_.grad_scaler != nullptr) parts_.grad_scaler->restore(progress.numbers);
  is_training_ = progress.stream.is_training;
  next_step_ = static_cast<int>(progress.stream.next_step);

  if (sink_ != nullptr) sink_->begin_step(std::max(0, next_step_ - 1));
  if (next_step_ > 0) {
    state();
  } else {
    record_parameters();
  }
}

// Setup rounds what it reads to the parameters' dtype; masters have more.
void Trainer::restore_masters() {
  if (!parts_.master_dtype.has_value()) return;
  const at::NoGradGuard no_grad;
  const at::ScalarType type = scalar_type_of(*parts_.master_dtype);
  NamedTensors& masters = parts_.data_parallel->masters();
  for (const ParameterSpec& spec : trained_) {
    at::Tensor& master = masters.at(spec.name);
    const Layout layout = parts_.data_parallel->piece_layout(spec.name);
    if (!layout.explicit_parts || !layout.boxes.empty()) {
      master.copy_(own_part(spec, type).view(master.sizes()));
      continue;
    }
    const at::Tensor flat = master.detach().view({-1});
    for (const FlatRange& range : layout.flat) {
      flat.narrow(0, range.local_begin, range.count)
          .copy_(read_run(*parts_.weights, type, spec, range.global_begin, range.count));
    }
  }
  parts_.data_parallel->publish();
}

// Like the pieces that are stepped, in the dtype in which they are.
NamedTensors Trainer::read_state(const Checkpoint& checkpoint) const {
  const at::NoGradGuard no_grad;
  const NamedTensors& masters = parts_.data_parallel->masters();
  NamedTensors state;
  for (const ParameterSpec& spec : trained_) {
    const at::Tensor& master = masters.at(spec.name);
    for (const std::string& name : checkpoint.state_names(spec.name)) {
      at::Tensor piece =
          at::zeros(master.sizes(), master.options().device(at::kCPU).requires_grad(false));
      parts_.checkpoint_io->read(checkpoint, name, parts_.data_parallel->piece_layout(spec.name),
                                 *mesh_, piece);
      state.emplace(name, piece.to(master.device()));
    }
  }
  return state;
}

}  // namespace isoshard
