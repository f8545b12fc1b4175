// SPDX-License-Identifier: Apache-2.0
// What stages of a pipeline and the attention of split sequences call.
#include "suite/record/step_table.h"

#include <algorithm>
#include <utility>

#include "subjects/parallel/frozen_weights.h"

namespace isoshard {

std::vector<int> StepTable::stages_of(const NumericsSpec& numerics, int rank) {
  std::vector<int> own;
  for (std::size_t s = 0; s < numerics.pipeline.stages.size(); ++s) {
    if (numerics.pipeline.rank_of_stage[s] == numerics.mesh.coordinate(rank, Axis::kPp))
      own.push_back(static_cast<int>(s));
  }
  return own;
}

int StepTable::shard_rank_of(const NumericsSpec& numerics, int rank) {
  const ShardGrouping& groups = numerics.data.sharding.groups;
  const int own = numerics.mesh.coordinate(rank, Axis::kDp) %
                  (numerics.mesh.degree(Axis::kDp) / groups.replicas);
  if (!groups.spans_context) return own;
  return own * numerics.mesh.degree(Axis::kCp) + numerics.mesh.coordinate(rank, Axis::kCp);
}

std::pair<std::size_t, std::size_t> StepTable::places_of(std::string_view module) const {
  const auto is_own = [&](const std::string& name) {
    return name.size() > module.size() && name.starts_with(module) && name[module.size()] == '.';
  };
  const auto first = std::ranges::find_if(in_order_, is_own);
  const auto end = std::find_if_not(first, in_order_.end(), is_own);
  return {static_cast<std::size_t>(first - in_order_.begin()),
          static_cast<std::size_t>(end - in_order_.begin())};
}

void StepTable::find_parameters() {
  find_trained();
  trained_ = trained_of(specs_, item_.settings);
  if (!is_pipeline()) return;
  std::erase_if(specs_, [&](const ParameterSpec& spec) {
    const std::vector<int>& readers = numerics_.pipeline.readers.at(spec.name);
    return std::find_first_of(readers.begin(), readers.end(), stages_.begin(), stages_.end()) ==
           readers.end();
  });
  trained_ = trained_of(specs_, item_.settings);
}

void StepTable::cp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                   Reduction reduction) {
  if (cp_ > 1) in_pass(add(Axis::kCp, op, purpose, dtype, count, reduction));
}

void StepTable::around(Purpose purpose, Dtype dtype, std::int64_t count) {
  cp(CollectiveOp::kSend, purpose, dtype, count);
  cp(CollectiveOp::kRecv, purpose, dtype, count);
}

void StepTable::attention(const std::string& layer, bool is_forward) {
  if (cp_ == 1) return;
  if (!is_forward && !has_input_gradient(layer + ".self_attn.o_proj")) return;
  const std::int64_t count = 2 * tokens() * key_features(layer);
  const Dtype in = product_dtype();
  if (!numerics_.context.ring.has_value()) {
    if (is_forward) {
      cp(CollectiveOp::kAllGather, Purpose::kRingKv, in, count);
    } else {
      cp(CollectiveOp::kReduceScatter, Purpose::kRingDkv, in, count);
    }
    return;
  }
  const Dtype wide = in == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
  for (int turn = 1; turn < cp_; ++turn) {
    around(Purpose::kRingKv, in, count);
    if (!is_forward) around(Purpose::kRingDkv, wide, count);
  }
  if (!is_forward) around(Purpose::kRingDkv, wide, count);
}

std::int64_t StepTable::key_features(const std::string& layer) const {
  const ModelConfig& config = model_.config();
  const std::int64_t all = config.num_kv_heads * config.head_dim;
  for (const auto& [name, cut] : numerics_.tensor.cuts) {
    if (!name.starts_with(layer + ".") || !name.ends_with(".k_proj.weight")) continue;
    std::int64_t rows = 0;
    for (const Range& range : cut.by_rank.at(static_cast<std::size_t>(tp_rank_)))
      rows += range.count;
    return rows;
  }
  return all;
}

void StepTable::add_shared() {
  const Dtype in = numerics_.precision.master_dtype.value_or(dtype());
  for (const auto& [name, readers] : numerics_.pipeline.readers) {
    if (readers.size() < 2 || !has_parameter(trained_, name)) continue;
    for (const CollectiveOp op : {CollectiveOp::kSend, CollectiveOp::kRecv})
      add(Axis::kPp, op, Purpose::kGradReduce, in, stepped_numel(name, shard_rank_));
  }
}

void StepTable::over_stages(Purpose purpose, std::int64_t count) {
  if (is_pipeline() && numerics_.mesh.degree(Axis::kPp) > 1)
    add(Axis::kPp, CollectiveOp::kAllReduce, purpose, Dtype::kFloat64, count);
}

void StepTable::run_stages() {
  for (const std::string& group : groups_in_order()) gather(group);
  is_in_stages_ = true;
  tell_shapes();
  for (std::int64_t m = 0; m < item_.micro_batches; ++m) {
    for (const int stage : stages_) pass(stage);
  }
  is_in_stages_ = false;
  report_loss();
  for (const std::string& group : groups_in_order()) scatter(group);
}

std::vector<std::string> StepTable::groups_in_order() const {
  std::vector<std::string> groups = layers_;
  groups.emplace_back();
  std::sort(groups.begin(), groups.end());
  return groups;
}

bool StepTable::is_elsewhere(int stage) const {
  return stage >= 0 && stage < static_cast<int>(numerics_.pipeline.stages.size()) &&
         std::find(stages_.begin(), stages_.end(), stage) == stages_.end();
}

void StepTable::transfer(CollectiveOp op, Purpose purpose, Dtype in, std::int64_t count) {
  in_pass(add(Axis::kPp, op, purpose, in, count));
}

void StepTable::tell_shapes() {
  constexpr std::int64_t kNumbers = 8;
  for (const int stage : stages_) {
    for (const int other : {stage - 1, stage + 1}) {
      if (!is_elsewhere(other)) continue;
      transfer(CollectiveOp::kSend, Purpose::kSetup, Dtype::kInt64, kNumbers);
      transfer(CollectiveOp::kRecv, Purpose::kSetup, Dtype::kInt64, kNumbers);
    }
  }
}

void StepTable::pass(int stage) {
  const ModelSection& section = numerics_.pipeline.stages[static_cast<std::size_t>(stage)];
  const std::int64_t passed = hidden() * (model_.config().model_type == "lattice" ? 2 : 1) /
                              (numerics_.sequence.is_cut ? tp_ : 1);
  if (is_elsewhere(stage - 1)) {
    transfer(CollectiveOp::kRecv, Purpose::kPipeForward, stream_dtype(), passed);
    transfer(CollectiveOp::kSend, Purpose::kPipeBackward, stream_dtype(), passed);
  }
  if (is_elsewhere(stage + 1)) {
    transfer(CollectiveOp::kSend, Purpose::kPipeForward, stream_dtype(), passed);
    transfer(CollectiveOp::kRecv, Purpose::kPipeBackward, stream_dtype(), passed);
  }
  if (section.has_embedding) {
    embedding(true);
    embedding(false);
  }
  for (auto index = static_cast<std::size_t>(section.first_layer);
       index < static_cast<std::size_t>(section.end_layer); ++index) {
    const std::string& name = layers_.at(index - first_layer_of_rank(index));
    layer(name, true);
    if (is_recomputed(static_cast<std::int64_t>(index), item_.settings.recompute_every))
      layer(name, true);
    layer(name, false);
  }
  if (section.has_head) head();
  if (section.has_head && numerics_.vocabulary.has_value() &&
      has_input_gradient(model_.head_module()))
    enter(Purpose::kVocabParallelBackward, false);
}

std::size_t StepTable::first_layer_of_rank(std::size_t index) const {
  std::size_t others = index;
  for (const int stage : stages_) {
    const ModelSection& section = numerics_.pipeline.stages[static_cast<std::size_t>(stage)];
    const auto first = static_cast<std::size_t>(section.first_layer),
               end = static_cast<std::size_t>(section.end_layer);
    if (first < index) others -= std::min(end, index) - first;
  }
  return others;
}

}  // namespace isoshard
