// SPDX-License-Identifier: Apache-2.0
// What an emulated rank records of parameters, data and state, and where it lies in the whole.
#include <ATen/ATen.h>

#include <set>
#include <utility>

#include "core/observe/record_name.h"
#include "suite/emulation/emulated_parts.h"
#include "suite/emulation/emulated_rank.h"

namespace isoshard {

Layout EmulatedRank::layout_of(const ParameterSpec& spec) const {
  return layout_of_part(run_->numerics.tensor, spec, coordinate(Axis::kTp));
}

Layout EmulatedRank::piece_layout(const ParameterSpec& spec) const {
  const std::optional<std::vector<Range>> runs = own_runs(spec.name);
  // of a group of one shard they are the whole part
  const bool is_whole = !runs.has_value() || shard_members().size() == 1;
  if (is_whole) return layout_of(spec);
  return layout_of_runs(run_->numerics.tensor, spec, coordinate(Axis::kTp),
                        parameters_.at(spec.name).sizes().vec(), *runs);
}

// Dim 0 holds this dp rank's samples.
Layout EmulatedRank::over_dp(const at::Tensor& local) const {
  Layout layout = replicated(local.sizes().vec());
  if (world_->degree(Axis::kDp) > 1) {
    layout.global_shape[0] *= world_->degree(Axis::kDp);
    layout.placements.push_back(shard(Axis::kDp, 0));
  }
  return layout;
}

void EmulatedRank::add_averages(Layout& layout) const {
  for (const Axis axis : {Axis::kDp, Axis::kCp}) {
    if (world_->degree(axis) > 1) layout.placements.push_back(partial(axis, Reduction::kAvg));
  }
}

void EmulatedRank::add_place_on_pp(Layout& layout, std::string_view name) const {
  const PipelineNumerics& pipeline = run_->numerics.pipeline;
  const int pp = world_->degree(Axis::kPp);
  if (pipeline.stages.empty() || pp == 1) return;
  std::set<int> holders{coordinate(Axis::kPp)};
  for (const auto& [parameter, readers] : pipeline.readers) {
    if (name != parameter && !name.starts_with(parameter + ".")) continue;
    for (const int stage : readers)
      holders.insert(pipeline.rank_of_stage.at(static_cast<std::size_t>(stage)));
  }
  if (std::ssize(holders) < pp)
    layout.placements.push_back(
        only_at(Axis::kPp, std::vector<int>(holders.begin(), holders.end())));
}

void EmulatedRank::record(RecordKind kind, std::string name, const at::Tensor& value,
                          Layout layout) {
  if (kind == RecordKind::kParam || kind == RecordKind::kGrad || kind == RecordKind::kOptimizer)
    add_place_on_pp(layout, name);
  sink_->on_record({kind, std::move(name), std::move(layout), 1.0}, value.detach());
}

void EmulatedRank::record_data(const TokenBatch& batch) {
  const at::Tensor sample_ids = at::tensor(batch.sample_ids, at::kLong);
  record(RecordKind::kDataId, "sample_ids", sample_ids, over_dp(sample_ids));
  record(RecordKind::kDataId, "input_ids", batch.input_ids_BS, over_dp(batch.input_ids_BS));
  record(RecordKind::kDataId, "labels", batch.labels_BS, over_dp(batch.labels_BS));
}

void EmulatedRank::record_parameters() {
  for (const ParameterSpec& spec : specs_) {
    const at::Tensor& part = parameters_.at(spec.name);
    const bool is_run = run_->numerics.data.sharding.keeps_runs;
    record(RecordKind::kParam, spec.name, is_run ? piece_of(spec.name, part) : part,
           is_run ? piece_layout(spec) : layout_of(spec));
  }
}

void EmulatedRank::record_state() {
  const NamedTensors state = optimizer_->state();
  const NumericsSpec& numerics = run_->numerics;
  const bool own_masters = numerics.precision.master_dtype.has_value();
  for (const ParameterSpec& spec : trained_) {
    const at::Tensor& stepped = has_masters() ? masters_.at(spec.name) : parameters_.at(spec.name);
    if (own_masters)
      record(RecordKind::kOptimizer, to_string(RecordName{spec.name, NameRole::kMaster}),
             masters_.at(spec.name), piece_layout(spec));
    const std::string prefix = spec.name + ".";
    for (auto entry = state.lower_bound(prefix);
         entry != state.end() && entry->first.starts_with(prefix); ++entry) {
      const bool like_parameter = entry->second.sizes() == stepped.sizes();
      record(RecordKind::kOptimizer, entry->first, entry->second,
             like_parameter ? piece_layout(spec) : replicated(entry->second.sizes().vec()));
    }
  }
  record_parameters();
}

// Where only some tp ranks hold summands of a part, nothing says where they lie.
void EmulatedRank::record_accumulated() {
  const NumericsSpec& numerics = run_->numerics;
  const bool is_reduced = numerics.data.accumulation.reduces_every_micro_batch;
  std::set<std::string> summed;  // later, over tp
  if (world_->degree(Axis::kTp) > 1) {
    for (const std::vector<std::string>& names : numerics.tensor.holder_sums)
      summed.insert(names.begin(), names.end());
  }
  for (const ParameterSpec& spec : trained_) {
    const auto readers = numerics.pipeline.readers.find(spec.name);
    if (readers != numerics.pipeline.readers.end() && readers->second.size() > 1) continue;
    const bool is_summed = summed.contains(spec.name);
    if (is_summed && cut_of(numerics.tensor, spec.name) != nullptr) continue;
    const at::Tensor& parameter = parameters_.at(spec.name);
    at::Tensor sum = parameter.grad();
    if (!added_.empty()) sum = added_.at(spec.name);
    Layout layout = is_reduced ? piece_layout(spec) : layout_of(spec);
    if (!is_reduced) add_averages(layout);
    if (is_summed) layout.placements.push_back(partial(Axis::kTp, Reduction::kSum));
    add_place_on_pp(layout);
    sink_->on_record({RecordKind::kGrad, to_string(RecordName{spec.name, NameRole::kMicroBatch}),
                      std::move(layout), scale()},
                     sum.defined() ? sum.detach() : at::zeros_like(parameter).detach());
  }
}

}  // namespace isoshard
