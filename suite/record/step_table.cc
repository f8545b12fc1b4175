// SPDX-License-Identifier: Apache-2.0
// What a model's layers, its gradients and its optimizer call.
#include "suite/record/step_table.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/observe/layer_name.h"

namespace isoshard {
namespace {

/// The place of a rotary decoder's parameter in the execution of its layer.
int place_in_layer(std::string_view parameter) {
  constexpr std::array<std::string_view, 6> kPlaces = {
      ".input_layernorm.", "_proj.", "_norm.", ".o_proj.", ".post_attention_layernorm.", ".mlp."};
  for (const std::size_t i : {3UL, 5UL, 0UL, 4UL, 2UL, 1UL}) {  // the longer names first
    if (parameter.find(kPlaces.at(i)) != std::string_view::npos) return static_cast<int>(i);
  }
  return 0;
}

std::string module_of(std::string_view parameter) {
  return std::string(parameter.substr(0, parameter.rfind('.')));
}

std::int64_t padded(std::int64_t size, std::int64_t unit) {
  return (size + unit - 1) / unit * unit;
}

}  // namespace

StepTable::StepTable(const Case& item, const NumericsSpec& numerics, const Model& model, int rank,
                     int step)
    : item_(item),
      numerics_(numerics),
      model_(model),
      dp_(numerics.mesh.degree(Axis::kDp)),
      tp_(numerics.mesh.degree(Axis::kTp)),
      cp_(numerics.mesh.degree(Axis::kCp)),
      replicas_(numerics.data.sharding.groups.replicas),
      shards_(dp_ / replicas_ * (numerics.data.sharding.groups.spans_context ? cp_ : 1)),
      stages_(stages_of(numerics, rank)),
      shard_rank_(shard_rank_of(numerics, rank)),
      tp_rank_(numerics.mesh.coordinate(rank, Axis::kTp)),
      specs_(model.parameters()) {
  find_parameters();
  for (const ParameterSpec& spec : specs_) {
    const std::string layer(layer_of(spec.name));
    if (!layer.empty() && (layers_.empty() || layers_.back() != layer) &&
        std::find(layers_.begin(), layers_.end(), layer) == layers_.end())
      layers_.push_back(layer);
  }
  const bool is_reloaded = item.reload_after != 0 && step >= item.reload_after;
  steps_before_ = step - (is_reloaded ? item.reload_after : item.first_step());
}

void StepTable::find_trained() {
  for (const ParameterSpec& spec : specs_) in_order_.push_back(spec.name);
  // norms of rotary decoders stand behind what comes after them
  for (auto begin = in_order_.begin(); begin != in_order_.end();) {
    const std::string layer(layer_of(*begin));
    const auto end = std::find_if(begin, in_order_.end(),
                                  [&](const std::string& name) { return layer_of(name) != layer; });
    const bool is_rotary = std::any_of(begin, end, [](const std::string& name) {
      return name.find(".post_attention_layernorm.") != std::string::npos;
    });
    if (is_rotary) std::ranges::stable_sort(begin, end, {}, place_in_layer);
    begin = end;
  }
  const IsFrozen is_frozen = frozen_by(item_.settings.freeze);
  all_trained_ = static_cast<std::size_t>(
      std::ranges::count_if(in_order_, [&](const std::string& name) { return !is_frozen(name); }));
  first_trained_ =
      static_cast<std::size_t>(std::ranges::find_if_not(in_order_, is_frozen) - in_order_.begin());
}

std::map<Axis, std::vector<ExpectedCall>> StepTable::calls() {
  if (item_.settings.loss_mean == LossMean::kGlobal)
    dp(CollectiveOp::kAllReduce, Purpose::kTokenCount, Dtype::kInt64, 1);
  if (is_pipeline()) {
    run_stages();
  } else {
    for (std::int64_t m = 0; m < item_.micro_batches; ++m) {
      const bool is_last = m + 1 == item_.micro_batches;
      forward();
      if (is_last) report_loss();
      backward();
      if (numerics_.data.accumulation.reduces_every_micro_batch || is_last) reduce_buckets();
    }
  }
  sum_over_holders();
  add_shared();
  if (item_.settings.loss_scale.is_on() && numerics_.mesh.world_size() > 1)
    add(Axis::kWorld, CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, 1,
        Reduction::kMax);
  norm();
  publish();
  return std::move(calls_);
}

ExpectedCall* StepTable::add(Axis axis, CollectiveOp op, Purpose purpose, Dtype dtype,
                             std::int64_t count, Reduction reduction) {
  ExpectedCall& expected = calls_[axis].emplace_back();
  expected.call.op = op;
  expected.call.purpose = purpose;
  expected.call.axis = axis;
  expected.call.dtype = dtype;
  expected.call.reduction = reduction;
  expected.call.count = count;
  return &expected;
}

ExpectedCall* StepTable::dp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                            Reduction reduction) {
  return dp_ == 1 ? nullptr : add(Axis::kDp, op, purpose, dtype, count, reduction);
}

void StepTable::tp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                   Reduction reduction) {
  if (tp_ > 1) in_pass(add(Axis::kTp, op, purpose, dtype, count, reduction));
}

ExpectedCall* StepTable::shards(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                                Reduction reduction) {
  return shards_ == 1 ? nullptr : add(Axis::kDp, op, purpose, dtype, count, reduction);
}

Dtype StepTable::product_dtype() const {
  return numerics_.precision.products.has_value() ? numerics_.precision.products->dtype : dtype();
}

Region StepTable::region_of(const std::string& module) const {
  const auto found = numerics_.tensor.regions.find(module);
  return found == numerics_.tensor.regions.end() ? Region::kReplicated : found->second;
}

void StepTable::enter(Purpose backward, bool is_forward) {
  if (numerics_.sequence.is_cut) {
    if (is_forward) {
      tp(CollectiveOp::kAllGather, Purpose::kSequenceGather, dtype(), hidden() / tp_);
    } else {
      tp(CollectiveOp::kReduceScatter, Purpose::kSequenceScatter, dtype(), hidden() / tp_);
    }
  } else if (!is_forward) {
    tp(CollectiveOp::kAllReduce, backward, dtype(), hidden());
  }
}

void StepTable::leave(Purpose forward, bool is_forward, Dtype in) {
  if (numerics_.sequence.is_cut) {
    if (is_forward) {
      tp(CollectiveOp::kReduceScatter, Purpose::kSequenceScatter, in, hidden() / tp_);
    } else {
      tp(CollectiveOp::kAllGather, Purpose::kSequenceGather, in, hidden() / tp_);
    }
  } else if (is_forward) {
    tp(CollectiveOp::kAllReduce, forward, in, hidden());
  }
}

void StepTable::module(const std::string& name, bool is_forward) {
  switch (region_of(name)) {
    case Region::kColumn:
      for (const SharedInput& shared : numerics_.tensor.shared_inputs) {
        const auto own = std::find(shared.modules.begin(), shared.modules.end(), name);
        if (own == shared.modules.end()) continue;
        const bool is_one = shared.fused.has_value() || shared.reduced_together;
        const bool is_called = is_forward || has_input_gradient(shared.modules.front());
        if (is_called && (!is_one || own == shared.modules.begin()))
          enter(Purpose::kColumnParallelBackward, is_forward);
      }
      break;
    case Region::kRow:
      if (is_forward || has_output_gradient(name))
        leave(Purpose::kRowParallelForward, is_forward, product_dtype());
      break;
    case Region::kVocabEmbedding:
      if (is_forward || has_output_gradient(name))
        leave(Purpose::kVocabParallelEmbed, is_forward, dtype());
      break;
    case Region::kVocabHead:
    case Region::kReplicated:
      break;
  }
}

std::vector<std::string> StepTable::modules_of(const std::string& layer) const {
  std::vector<std::string> modules;
  for (const ParameterSpec& spec : specs_) {
    if (layer_of(spec.name) == layer && spec.name.ends_with(".weight"))
      modules.push_back(module_of(spec.name));
  }
  return modules;
}

void StepTable::layer(const std::string& name, bool is_forward) {
  std::vector<std::string> modules = modules_of(name);
  if (!is_forward) std::reverse(modules.begin(), modules.end());
  for (const std::string& own : modules) module(own, is_forward);
  attention(name, is_forward);
}

void StepTable::embedding(bool is_forward) {
  for (const std::string& own : modules_of("")) {
    if (region_of(own) == Region::kVocabEmbedding) module(own, is_forward);
  }
}

void StepTable::report_loss() {
  if (cp_ > 1)
    add(Axis::kCp, CollectiveOp::kAllReduce, Purpose::kLossReduce, Dtype::kFloat64,
        item_.batch_size * item_.micro_batches);
  dp(CollectiveOp::kAllReduce, Purpose::kLossReduce, Dtype::kFloat64, 1, Reduction::kAvg);
  over_stages(Purpose::kLossReduce, 1);
}

void StepTable::forward() {
  gather("");
  embedding(true);
  for (const std::string& name : layers_) {
    gather(name);
    layer(name, true);
  }
  head();
}

void StepTable::head() {
  if (!numerics_.vocabulary.has_value()) return;
  enter(Purpose::kVocabParallelBackward, true);
  const Dtype wide = numerics_.vocabulary->loss_dtype;
  if (model_.loss_kind() == LossKind::kLinear) {
    tp(CollectiveOp::kAllReduce, Purpose::kVocabParallelTarget, Dtype::kFloat64, tokens());
    return;
  }
  tp(CollectiveOp::kAllReduce, Purpose::kVocabParallelMax, wide, tokens(), Reduction::kMax);
  tp(CollectiveOp::kAllReduce, Purpose::kVocabParallelLogsumexp, wide, tokens());
  tp(CollectiveOp::kAllReduce, Purpose::kVocabParallelTarget, wide, tokens());
  if (item_.settings.label_smoothing != 0)
    tp(CollectiveOp::kAllReduce, Purpose::kVocabParallelSmoothing, wide, tokens());
}

void StepTable::backward() {
  if (numerics_.vocabulary.has_value() && has_input_gradient(model_.head_module()))
    enter(Purpose::kVocabParallelBackward, false);
  for (auto name = layers_.rbegin(); name != layers_.rend() && has_output_gradient(*name); ++name) {
    gather(*name);
    if (is_recomputed(std::distance(name, layers_.rend()) - 1, item_.settings.recompute_every))
      layer(*name, true);
    layer(*name, false);
    scatter(*name);
  }
  embedding(false);
  scatter("");
}

std::int64_t StepTable::part_numel(const std::string& name) const {
  const auto spec = std::find_if(specs_.begin(), specs_.end(),
                                 [&](const ParameterSpec& s) { return s.name == name; });
  const auto cut = numerics_.tensor.cuts.find(name);
  if (cut == numerics_.tensor.cuts.end()) return numel_of(spec->shape);
  std::int64_t rows = 0;
  for (const Range& range : cut->second.by_rank.at(static_cast<std::size_t>(tp_rank_)))
    rows += range.count;
  if (cut->second.padded_size > 0) rows = cut->second.padded_size;
  return numel_of(spec->shape) / spec->shape.at(static_cast<std::size_t>(cut->second.dim)) * rows;
}

std::int64_t StepTable::stepped_numel(const std::string& name, int dp_rank) const {
  const auto runs = numerics_.data.sharding.stepped_runs.find(name);
  if (runs == numerics_.data.sharding.stepped_runs.end()) return part_numel(name);
  std::int64_t count = 0;
  for (const Range& run : runs->second.at(static_cast<std::size_t>(dp_rank))) count += run.count;
  return count;
}

std::int64_t StepTable::block_numel(const std::string& group, bool of_trained_only) const {
  std::int64_t count = 0;
  for (const ParameterSpec& spec : of_trained_only ? trained_ : specs_) {
    if (layer_of(spec.name) == group) count += stepped_numel(spec.name, 0);
  }
  return count;
}

void StepTable::gather(const std::string& group) {
  const std::int64_t count = block_numel(group, /*of_trained_only=*/false);
  if (is_sharded() && count > 0)
    shards(CollectiveOp::kAllGather, Purpose::kParamGather, dtype(), count);
}

void StepTable::scatter(const std::string& group) {
  if (!numerics_.data.sharding.groups.spans_context && !is_sharded()) return;
  const std::int64_t count = block_numel(group, /*of_trained_only=*/true);
  if (count == 0) return;
  const Dtype in = numerics_.data.parameter_gradient.dtype.value_or(dtype());
  shards(CollectiveOp::kReduceScatter, Purpose::kGradReduce, in, count,
         numerics_.data.parameter_gradient.reduction);
  if (replicas_ > 1)
    add(Axis::kDpReplicate, CollectiveOp::kAllReduce, Purpose::kGradReduce, in, count,
        Reduction::kAvg);
}

void StepTable::reduce_buckets() {
  if (is_sharded() || dp_ == 1 || numerics_.data.sharding.groups.spans_context) return;
  const GradientBuckets& buckets = numerics_.data.buckets;
  const Dtype in = numerics_.data.parameter_gradient.dtype.value_or(
      numerics_.data.accumulation.dtype.value_or(dtype()));
  const Reduction how = numerics_.data.parameter_gradient.reduction;
  if (buckets.rebuilt.has_value() && steps_before_ > 0) {
    if (steps_before_ == 1)
      dp(CollectiveOp::kBroadcast, Purpose::kSetup, Dtype::kInt64,
         static_cast<std::int64_t>(trained_.size()));
    std::int64_t all = 0;
    for (const ParameterSpec& spec : trained_) all += part_numel(spec.name);
    dp(CollectiveOp::kAllReduce, Purpose::kGradReduce, in, all, how)->may_be_split = true;
    return;
  }
  for (std::size_t b = 0; b < buckets.parameters.size(); ++b) {
    std::int64_t count = 0;
    for (const std::string& name : buckets.parameters[b]) count += part_numel(name);
    if (!buckets.places.empty()) count = buckets.places[b].numel;
    if (numerics_.data.sharding.reduces_to_owner) {
      dp(CollectiveOp::kReduceScatterUneven, Purpose::kGradReduce, in, count, how);
    } else if (is_distributed()) {
      dp(CollectiveOp::kReduceScatter, Purpose::kGradReduce, in, count / dp_, how);
    } else {
      dp(CollectiveOp::kAllReduce, Purpose::kGradReduce, in, count, how);
    }
  }
}

bool StepTable::is_distributed() const {
  return !numerics_.data.buckets.places.empty() && !numerics_.data.sharding.stepped_runs.empty();
}

void StepTable::sum_over_holders() {
  const Dtype in = numerics_.precision.master_dtype.value_or(dtype());
  for (const std::vector<std::string>& names : numerics_.tensor.holder_sums) {
    std::int64_t count = 0;
    for (const std::string& name : names) {
      if (has_parameter(trained_, name)) count += stepped_numel(name, shard_rank_);
    }
    if (count > 0 && has_other_holders(names.front()))
      tp(CollectiveOp::kAllReduce, Purpose::kGradReduce, in, count);
  }
}

bool StepTable::has_parameter(const std::vector<ParameterSpec>& specs, const std::string& name) {
  return std::any_of(specs.begin(), specs.end(),
                     [&](const ParameterSpec& spec) { return spec.name == name; });
}

bool StepTable::has_other_holders(const std::string& name) const {
  const auto cut = numerics_.tensor.cuts.find(name);
  if (cut == numerics_.tensor.cuts.end()) return true;
  const auto same = [&](const std::vector<Range>& ranges) {
    return std::equal(
        ranges.begin(), ranges.end(),
        cut->second.by_rank.at(static_cast<std::size_t>(tp_rank_)).begin(),
        cut->second.by_rank.at(static_cast<std::size_t>(tp_rank_)).end(),
        [](const Range& a, const Range& b) { return a.begin == b.begin && a.count == b.count; });
  };
  return std::count_if(cut->second.by_rank.begin(), cut->second.by_rank.end(), same) > 1;
}

void StepTable::norm() {
  const auto all = static_cast<std::int64_t>(all_trained_);
  if (numerics_.norm.is_torchs) {
    if (!numerics_.data.sharding.stepped_runs.empty())
      shards(CollectiveOp::kAllReduce, Purpose::kClipNorm,
             numerics_.precision.master_dtype.value_or(dtype()), all);
    return;
  }
  if (!numerics_.data.sharding.stepped_runs.empty())
    shards(CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, all);
  const IsFrozen is_frozen = frozen_by(item_.settings.freeze);
  const auto cut = std::ranges::count_if(
      numerics_.tensor.cuts, [&](const auto& entry) { return !is_frozen(entry.first); });
  if (cut > 0) tp(CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, cut);
  over_stages(Purpose::kClipNorm, all);
}

void StepTable::publish() {
  if (is_sharded() || numerics_.data.sharding.stepped_runs.empty() || shards_ == 1) return;
  const auto gathered = [&](std::int64_t count) {
    if (ExpectedCall* call = dp(CollectiveOp::kAllGather, Purpose::kParamGather, dtype(), count))
      call->only_if_stepped = true;
  };
  if (is_distributed()) {
    for (const BucketPlaces& bucket : numerics_.data.buckets.places) gathered(bucket.numel / dp_);
    return;
  }
  std::int64_t all = 0;
  for (const ParameterSpec& spec : trained_) all += part_numel(spec.name);
  constexpr std::int64_t kAligned = 2;  // elements, on each rank (DeepSpeed's alignment)
  gathered(padded(all, kAligned * dp_) / dp_);
}

}  // namespace isoshard
