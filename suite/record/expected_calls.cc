// SPDX-License-Identifier: Apache-2.0
// One step's calls, axis by axis, in the order in which a step makes them.
#include "suite/record/expected_calls.h"

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "harness/bundle/run_calls.h"
#include "subjects/model/model.h"
#include "suite/record/make_subject.h"

namespace isoshard {
namespace {

/// "model.layers.0" of "model.layers.0.mlp.up_proj.weight": up to the first number; empty outside.
std::string layer_of(std::string_view parameter) {
  for (std::size_t begin = 0; begin < parameter.size();) {
    const std::size_t end = std::min(parameter.find('.', begin), parameter.size());
    const std::string_view part = parameter.substr(begin, end - begin);
    if (!part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos)
      return std::string(parameter.substr(0, end));
    begin = end + 1;
  }
  return "";
}

std::string module_of(std::string_view parameter) {
  return std::string(parameter.substr(0, parameter.rfind('.')));
}

std::int64_t padded(std::int64_t size, std::int64_t unit) {
  return (size + unit - 1) / unit * unit;
}

/// Writes down the calls of one rank in one step.
class StepTable {
 public:
  StepTable(const Case& item, const NumericsSpec& numerics, const Model& model, int rank, int step)
      : item_(item),
        numerics_(numerics),
        model_(model),
        dp_(numerics.mesh.degree(Axis::kDp)),
        tp_(numerics.mesh.degree(Axis::kTp)),
        dp_rank_(numerics.mesh.coordinate(rank, Axis::kDp)),
        tp_rank_(numerics.mesh.coordinate(rank, Axis::kTp)),
        specs_(model.parameters()) {
    for (const ParameterSpec& spec : specs_) {
      const std::string layer = layer_of(spec.name);
      if (!layer.empty() && (layers_.empty() || layers_.back() != layer) &&
          std::find(layers_.begin(), layers_.end(), layer) == layers_.end())
        layers_.push_back(layer);
    }
    const bool is_reloaded = item.reload_after != 0 && step >= item.reload_after;
    steps_before_ = step - (is_reloaded ? item.reload_after : item.first_step());
  }

  std::map<Axis, std::vector<ExpectedCall>> calls() {
    if (item_.settings.loss_mean == LossMean::kGlobal)
      dp(CollectiveOp::kAllReduce, Purpose::kTokenCount, Dtype::kInt64, 1);
    for (std::int64_t m = 0; m < item_.micro_batches; ++m) {
      const bool is_last = m + 1 == item_.micro_batches;
      forward();
      if (is_last)
        dp(CollectiveOp::kAllReduce, Purpose::kLossReduce, Dtype::kFloat64, 1, Reduction::kAvg);
      backward();
      if (numerics_.data.accumulation.reduces_every_micro_batch || is_last) reduce_buckets();
    }
    sum_over_holders();
    if (item_.settings.loss_scale.is_on() && dp_ * tp_ > 1)
      add(Axis::kWorld, CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, 1,
          Reduction::kMax);
    norm();
    publish();
    return std::move(calls_);
  }

 private:
  ExpectedCall* add(Axis axis, CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                    Reduction reduction = Reduction::kSum) {
    ExpectedCall& expected = calls_[axis].emplace_back();
    expected.call.op = op;
    expected.call.purpose = purpose;
    expected.call.axis = axis;
    expected.call.dtype = dtype;
    expected.call.reduction = reduction;
    expected.call.count = count;
    return &expected;
  }
  /// nullptr in a group of one, which calls nobody.
  ExpectedCall* dp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                   Reduction reduction = Reduction::kSum) {
    return dp_ == 1 ? nullptr : add(Axis::kDp, op, purpose, dtype, count, reduction);
  }
  void tp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
          Reduction reduction = Reduction::kSum) {
    if (tp_ > 1) add(Axis::kTp, op, purpose, dtype, count, reduction);
  }

  [[nodiscard]] std::int64_t tokens() const { return item_.batch_size * item_.seq_length; }
  [[nodiscard]] std::int64_t hidden() const { return tokens() * model_.config().hidden_size; }
  [[nodiscard]] Dtype dtype() const { return numerics_.precision.dtype; }
  [[nodiscard]] Dtype product_dtype() const {
    return numerics_.precision.products.has_value() ? numerics_.precision.products->dtype : dtype();
  }
  [[nodiscard]] bool is_sharded() const { return numerics_.data.sharding.keeps_runs && dp_ > 1; }

  [[nodiscard]] Region region_of(const std::string& module) const {
    const auto found = numerics_.tensor.regions.find(module);
    return found == numerics_.tensor.regions.end() ? Region::kReplicated : found->second;
  }

  // A whole tensor of the residual stream enters a region, and its gradient leaves it.
  void enter(Purpose backward, bool is_forward) {
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
  // A rank's summand leaves a region, and its gradient enters it.
  void leave(Purpose forward, bool is_forward, Dtype in) {
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

  /// Of a module, or of the modules that are one product.
  void module(const std::string& name, bool is_forward) {
    switch (region_of(name)) {
      case Region::kColumn:
        for (const SharedInput& shared : numerics_.tensor.shared_inputs) {
          const auto own = std::find(shared.modules.begin(), shared.modules.end(), name);
          if (own == shared.modules.end()) continue;
          const bool is_one = shared.fused.has_value() || shared.reduced_together;
          if (!is_one || own == shared.modules.begin())
            enter(Purpose::kColumnParallelBackward, is_forward);
        }
        break;
      case Region::kRow:
        leave(Purpose::kRowParallelForward, is_forward, product_dtype());
        break;
      case Region::kVocabEmbedding:
        leave(Purpose::kVocabParallelEmbed, is_forward, dtype());
        break;
      case Region::kVocabHead:
      case Region::kReplicated:
        break;
    }
  }

  /// The modules of a layer in the order of execution, which is that of their parameters.
  [[nodiscard]] std::vector<std::string> modules_of(const std::string& layer) const {
    std::vector<std::string> modules;
    for (const ParameterSpec& spec : specs_) {
      if (layer_of(spec.name) == layer && spec.name.ends_with(".weight"))
        modules.push_back(module_of(spec.name));
    }
    return modules;
  }
  void layer(const std::string& name, bool is_forward) {
    std::vector<std::string> modules = modules_of(name);
    if (!is_forward) std::reverse(modules.begin(), modules.end());
    for (const std::string& own : modules) module(own, is_forward);
  }
  void embedding(bool is_forward) {
    for (const std::string& own : modules_of("")) {
      if (region_of(own) == Region::kVocabEmbedding) module(own, is_forward);
    }
  }

  void forward() {
    gather("");
    embedding(true);
    for (const std::string& name : layers_) {
      gather(name);
      layer(name, true);
    }
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

  void backward() {
    if (numerics_.vocabulary.has_value()) enter(Purpose::kVocabParallelBackward, false);
    for (auto name = layers_.rbegin(); name != layers_.rend(); ++name) {
      gather(*name);
      if (item_.settings.recompute) layer(*name, true);
      layer(*name, false);
      scatter(*name);
    }
    embedding(false);
    scatter("");
  }

  /// Elements of this tp rank's part of a parameter.
  [[nodiscard]] std::int64_t part_numel(const std::string& name) const {
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
  /// Elements of it that a dp rank steps.
  [[nodiscard]] std::int64_t stepped_numel(const std::string& name, int dp_rank) const {
    const auto runs = numerics_.data.sharding.stepped_runs.find(name);
    if (runs == numerics_.data.sharding.stepped_runs.end()) return part_numel(name);
    std::int64_t count = 0;
    for (const Range& run : runs->second.at(static_cast<std::size_t>(dp_rank))) count += run.count;
    return count;
  }

  /// Of a group of parameters that are kept as runs and gathered together: one block a rank, where
  /// each parameter has as much room as its largest piece, which is the first.
  [[nodiscard]] std::int64_t block_numel(const std::string& group) const {
    std::int64_t count = 0;
    for (const ParameterSpec& spec : specs_) {
      if (layer_of(spec.name) == group) count += stepped_numel(spec.name, 0);
    }
    return count;
  }
  void gather(const std::string& group) {
    if (is_sharded() && block_numel(group) > 0)
      dp(CollectiveOp::kAllGather, Purpose::kParamGather, dtype(), block_numel(group));
  }
  void scatter(const std::string& group) {
    if (is_sharded() && block_numel(group) > 0)
      dp(CollectiveOp::kReduceScatter, Purpose::kGradReduce,
         numerics_.data.parameter_gradient.dtype.value_or(dtype()), block_numel(group),
         Reduction::kAvg);
  }

  void reduce_buckets() {
    if (is_sharded() || dp_ == 1) return;
    const GradientBuckets& buckets = numerics_.data.buckets;
    const Dtype in = numerics_.data.accumulation.dtype.value_or(dtype());
    if (buckets.rebuilt.has_value() && steps_before_ > 0) {
      if (steps_before_ == 1)
        dp(CollectiveOp::kBroadcast, Purpose::kSetup, Dtype::kInt64,
           static_cast<std::int64_t>(specs_.size()));
      std::int64_t all = 0;
      for (const ParameterSpec& spec : specs_) all += part_numel(spec.name);
      dp(CollectiveOp::kAllReduce, Purpose::kGradReduce, in, all, Reduction::kAvg)->may_be_split =
          true;
      return;
    }
    for (std::size_t b = 0; b < buckets.parameters.size(); ++b) {
      std::int64_t count = 0;
      for (const std::string& name : buckets.parameters[b]) count += part_numel(name);
      if (!buckets.places.empty()) count = buckets.places[b].numel;
      if (numerics_.data.sharding.reduces_to_owner) {
        dp(CollectiveOp::kReduceScatterUneven, Purpose::kGradReduce, in, count, Reduction::kAvg);
      } else if (is_distributed()) {
        dp(CollectiveOp::kReduceScatter, Purpose::kGradReduce, in, count / dp_, Reduction::kAvg);
      } else {
        dp(CollectiveOp::kAllReduce, Purpose::kGradReduce, in, count, Reduction::kAvg);
      }
    }
  }

  /// Each bucket lies padded in a buffer, of which each dp rank has an equal part.
  [[nodiscard]] bool is_distributed() const {
    return !numerics_.data.buckets.places.empty() && !numerics_.data.sharding.stepped_runs.empty();
  }

  void sum_over_holders() {
    const Dtype in = numerics_.precision.master_dtype.value_or(dtype());
    for (const std::vector<std::string>& names : numerics_.tensor.holder_sums) {
      std::int64_t count = 0;
      for (const std::string& name : names) count += stepped_numel(name, dp_rank_);
      if (count > 0 && has_other_holders(names.front()))
        tp(CollectiveOp::kAllReduce, Purpose::kGradReduce, in, count);
    }
  }
  [[nodiscard]] bool has_other_holders(const std::string& name) const {
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

  void norm() {
    if (!numerics_.data.sharding.stepped_runs.empty())
      dp(CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64,
         static_cast<std::int64_t>(specs_.size()));
    const auto cut = static_cast<std::int64_t>(numerics_.tensor.cuts.size());
    if (cut > 0) tp(CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, cut);
  }

  /// Stepped pieces come back to where forward reads them: flat buffers of all parameters, or
  /// bucket by bucket.
  void publish() {
    if (is_sharded() || numerics_.data.sharding.stepped_runs.empty()) return;
    const auto gathered = [&](std::int64_t count) {
      if (ExpectedCall* call = dp(CollectiveOp::kAllGather, Purpose::kParamGather, dtype(), count))
        call->only_if_stepped = true;
    };
    if (is_distributed()) {
      for (const BucketPlaces& bucket : numerics_.data.buckets.places) gathered(bucket.numel / dp_);
      return;
    }
    std::int64_t all = 0;
    for (const ParameterSpec& spec : specs_) all += part_numel(spec.name);
    constexpr std::int64_t kAligned = 2;  // elements, on each rank (DeepSpeed's alignment)
    gathered(padded(all, kAligned * dp_) / dp_);
  }

  const Case& item_;
  const NumericsSpec& numerics_;
  const Model& model_;
  int dp_, tp_, dp_rank_, tp_rank_;
  int steps_before_ = 0;  ///< of the same trainer, which forgets when it is loaded anew
  std::vector<ParameterSpec> specs_;
  std::vector<std::string> layers_;
  std::map<Axis, std::vector<ExpectedCall>> calls_;
};

/// Made at the first question, and kept.
struct Tables {
  explicit Tables(const Case& of) : item(of) {}
  const Case item;
  std::unique_ptr<Model> model;
  NumericsSpec numerics;
  std::map<std::pair<int, int>, std::map<Axis, std::vector<ExpectedCall>>> by_rank_and_step;
};

}  // namespace

CollectiveTable collective_table(const Case& item) {
  if (!declares_numerics(item)) return {};
  return [tables = std::make_shared<Tables>(item)](int rank, int step, Axis axis) {
    if (tables->model == nullptr) {
      tables->model = make_model(tables->item.config, tables->item.attention);
      tables->numerics = numerics_of(tables->item);
    }
    const auto [entry, is_new] = tables->by_rank_and_step.try_emplace({rank, step});
    if (is_new)
      entry->second = StepTable(tables->item, tables->numerics, *tables->model, rank, step).calls();
    return entry->second[axis];
  };
}

std::string with_calls_of(std::string_view settings, std::span<const Case> cases) {
  nlohmann::json all = nlohmann::json::parse(settings), tables = nlohmann::json::array();
  for (const Case& item : cases) {
    const CollectiveTable table = collective_table(item);
    if (table && item.world_size() > 1)
      tables.push_back(calls_json(item.subject, item.mesh(), item.first_step(), item.steps, table));
  }
  if (!tables.empty()) all["judging"]["collectives"] = std::move(tables);
  return all.dump();
}

JudgePolicy with_collectives(JudgePolicy policy, const Case& item) {
  policy.collectives = collective_table(item);
  return policy;
}

}  // namespace isoshard
