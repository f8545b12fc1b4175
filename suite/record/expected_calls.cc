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
        cp_(numerics.mesh.degree(Axis::kCp)),
        replicas_(numerics.data.sharding.groups.replicas),
        shards_(dp_ / replicas_ * (numerics.data.sharding.groups.spans_context ? cp_ : 1)),
        stages_(stages_of(numerics, rank)),
        shard_rank_(shard_rank_of(numerics, rank)),
        tp_rank_(numerics.mesh.coordinate(rank, Axis::kTp)),
        specs_(model.parameters()) {
    find_parameters();
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
    if (item_.settings.loss_scale.is_on() && numerics_.mesh.world_size() > 1)
      add(Axis::kWorld, CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, 1,
          Reduction::kMax);
    norm();
    publish();
    return std::move(calls_);
  }

 private:
  /// Of this rank, in the order of the model.
  static std::vector<int> stages_of(const NumericsSpec& numerics, int rank) {
    std::vector<int> own;
    for (std::size_t s = 0; s < numerics.pipeline.stages.size(); ++s) {
      if (numerics.pipeline.rank_of_stage[s] == numerics.mesh.coordinate(rank, Axis::kPp))
        own.push_back(static_cast<int>(s));
    }
    return own;
  }
  static int shard_rank_of(const NumericsSpec& numerics, int rank) {
    const ShardGrouping& groups = numerics.data.sharding.groups;
    const int own = numerics.mesh.coordinate(rank, Axis::kDp) %
                    (numerics.mesh.degree(Axis::kDp) / groups.replicas);
    if (!groups.spans_context) return own;
    return own * numerics.mesh.degree(Axis::kCp) + numerics.mesh.coordinate(rank, Axis::kCp);
  }
  [[nodiscard]] bool is_pipeline() const { return !numerics_.pipeline.stages.empty(); }
  /// Of a pipeline those that own stages read.
  void find_parameters() {
    all_specs_ = specs_.size();
    if (!is_pipeline()) return;
    std::erase_if(specs_, [&](const ParameterSpec& spec) {
      const std::vector<int>& readers = numerics_.pipeline.readers.at(spec.name);
      return std::find_first_of(readers.begin(), readers.end(), stages_.begin(), stages_.end()) ==
             readers.end();
    });
  }

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
    if (tp_ > 1) in_pass(add(Axis::kTp, op, purpose, dtype, count, reduction));
  }
  void cp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
          Reduction reduction = Reduction::kSum) {
    if (cp_ > 1) in_pass(add(Axis::kCp, op, purpose, dtype, count, reduction));
  }
  /// To the next rank of a ring, and from the one before.
  void around(Purpose purpose, Dtype dtype, std::int64_t count) {
    cp(CollectiveOp::kSend, purpose, dtype, count);
    cp(CollectiveOp::kRecv, purpose, dtype, count);
  }
  void in_pass(ExpectedCall* call) const { call->any_order = is_in_stages_; }
  /// Among those that have parts of one parameter together; they are called dp in the journal.
  ExpectedCall* shards(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                       Reduction reduction = Reduction::kSum) {
    return shards_ == 1 ? nullptr : add(Axis::kDp, op, purpose, dtype, count, reduction);
  }

  /// That a rank's forward gets of a micro-batch.
  [[nodiscard]] std::int64_t tokens() const { return item_.batch_size * item_.seq_length / cp_; }
  [[nodiscard]] std::int64_t hidden() const { return tokens() * model_.config().hidden_size; }
  [[nodiscard]] Dtype dtype() const { return numerics_.precision.dtype; }
  [[nodiscard]] Dtype product_dtype() const {
    return numerics_.precision.products.has_value() ? numerics_.precision.products->dtype : dtype();
  }
  [[nodiscard]] bool is_sharded() const { return numerics_.data.sharding.keeps_runs && shards_ > 1; }

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
    attention(name, is_forward);
  }
  /// Along cp, where nothing else is called in a layer.
  void attention(const std::string& layer, bool is_forward) {
    if (cp_ == 1) return;
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
  /// Of a token's keys, on this tp rank.
  [[nodiscard]] std::int64_t key_features(const std::string& layer) const {
    const ModelConfig& config = model_.config();
    const std::int64_t all = config.num_kv_heads * config.head_dim;
    for (const auto& [name, cut] : numerics_.tensor.cuts) {
      if (layer_of(name) != layer || !name.ends_with(".k_proj.weight")) continue;
      std::int64_t rows = 0;
      for (const Range& range : cut.by_rank.at(static_cast<std::size_t>(tp_rank_)))
        rows += range.count;
      return rows;
    }
    return all;
  }
  void embedding(bool is_forward) {
    for (const std::string& own : modules_of("")) {
      if (region_of(own) == Region::kVocabEmbedding) module(own, is_forward);
    }
  }

  void report_loss() {
    if (cp_ > 1)
      add(Axis::kCp, CollectiveOp::kAllReduce, Purpose::kLossReduce, Dtype::kFloat64,
          item_.batch_size * item_.micro_batches);
    dp(CollectiveOp::kAllReduce, Purpose::kLossReduce, Dtype::kFloat64, 1, Reduction::kAvg);
    over_stages(Purpose::kLossReduce, 1);
  }
  void over_stages(Purpose purpose, std::int64_t count) {
    if (is_pipeline() && numerics_.mesh.degree(Axis::kPp) > 1)
      add(Axis::kPp, CollectiveOp::kAllReduce, purpose, Dtype::kFloat64, count);
  }

  /// Parameters are gathered once, and gradients reduced once.
  void run_stages() {
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
  /// Names of layers sort as text.
  [[nodiscard]] std::vector<std::string> groups_in_order() const {
    std::vector<std::string> groups = layers_;
    groups.emplace_back();
    std::sort(groups.begin(), groups.end());
    return groups;
  }
  [[nodiscard]] bool is_elsewhere(int stage) const {
    return stage >= 0 && stage < static_cast<int>(numerics_.pipeline.stages.size()) &&
           std::find(stages_.begin(), stages_.end(), stage) == stages_.end();
  }
  void transfer(CollectiveOp op, Purpose purpose, Dtype in, std::int64_t count) {
    in_pass(add(Axis::kPp, op, purpose, in, count));
  }
  /// Eight numbers a neighbor and direction, once a step.
  void tell_shapes() {
    constexpr std::int64_t kNumbers = 8;
    for (const int stage : stages_) {
      for (const int other : {stage - 1, stage + 1}) {
        if (!is_elsewhere(other)) continue;
        transfer(CollectiveOp::kSend, Purpose::kSetup, Dtype::kInt64, kNumbers);
        transfer(CollectiveOp::kRecv, Purpose::kSetup, Dtype::kInt64, kNumbers);
      }
    }
  }
  /// One micro-batch, forward and backward.
  void pass(int stage) {
    const ModelSection& section = numerics_.pipeline.stages[static_cast<std::size_t>(stage)];
    const std::int64_t passed = hidden() * (model_.config().model_type == "lattice" ? 2 : 1);
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
      if (item_.settings.recompute) layer(name, true);
      layer(name, false);
    }
    if (section.has_head) head();
    if (section.has_head && numerics_.vocabulary.has_value())
      enter(Purpose::kVocabParallelBackward, false);
  }
  /// How many layers before layer `index` of the model this rank does not have.
  [[nodiscard]] std::size_t first_layer_of_rank(std::size_t index) const {
    std::size_t others = index;
    for (const int stage : stages_) {
      const ModelSection& section = numerics_.pipeline.stages[static_cast<std::size_t>(stage)];
      const auto first = static_cast<std::size_t>(section.first_layer),
                 end = static_cast<std::size_t>(section.end_layer);
      if (first < index) others -= std::min(end, index) - first;
    }
    return others;
  }
  /// Of the residual stream.
  [[nodiscard]] Dtype stream_dtype() const { return dtype(); }

  void forward() {
    gather("");
    embedding(true);
    for (const std::string& name : layers_) {
      gather(name);
      layer(name, true);
    }
    head();
  }

  void head() {
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
      shards(CollectiveOp::kAllGather, Purpose::kParamGather, dtype(), block_numel(group));
  }
  void scatter(const std::string& group) {
    if (!numerics_.data.sharding.groups.spans_context && !is_sharded()) return;
    if (block_numel(group) == 0) return;
    const Dtype in = numerics_.data.parameter_gradient.dtype.value_or(dtype());
    shards(CollectiveOp::kReduceScatter, Purpose::kGradReduce, in, block_numel(group),
           Reduction::kAvg);
    if (replicas_ > 1)
      add(Axis::kDpReplicate, CollectiveOp::kAllReduce, Purpose::kGradReduce, in,
          block_numel(group), Reduction::kAvg);
  }

  void reduce_buckets() {
    if (is_sharded() || dp_ == 1 || numerics_.data.sharding.groups.spans_context) return;
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
      for (const std::string& name : names) {
        if (has_parameter(name)) count += stepped_numel(name, shard_rank_);
      }
      if (count > 0 && has_other_holders(names.front()))
        tp(CollectiveOp::kAllReduce, Purpose::kGradReduce, in, count);
    }
  }
  [[nodiscard]] bool has_parameter(const std::string& name) const {
    return std::any_of(specs_.begin(), specs_.end(),
                       [&](const ParameterSpec& spec) { return spec.name == name; });
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
    const auto all = static_cast<std::int64_t>(all_specs_);
    if (!numerics_.data.sharding.stepped_runs.empty())
      shards(CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, all);
    const auto cut = static_cast<std::int64_t>(numerics_.tensor.cuts.size());
    if (cut > 0) tp(CollectiveOp::kAllReduce, Purpose::kClipNorm, Dtype::kFloat64, cut);
    over_stages(Purpose::kClipNorm, all);
  }

  /// Stepped pieces come back to where forward reads them: flat buffers of all parameters, or
  /// bucket by bucket.
  void publish() {
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
    for (const ParameterSpec& spec : specs_) all += part_numel(spec.name);
    constexpr std::int64_t kAligned = 2;  // elements, on each rank (DeepSpeed's alignment)
    gathered(padded(all, kAligned * dp_) / dp_);
  }

  const Case& item_;
  const NumericsSpec& numerics_;
  const Model& model_;
  int dp_, tp_, cp_, replicas_, shards_;
  std::vector<int> stages_;  ///< own ones, of a pipeline
  int shard_rank_, tp_rank_;
  bool is_in_stages_ = false;
  int steps_before_ = 0;  ///< of the same trainer, which forgets when it is loaded anew
  std::vector<ParameterSpec> specs_;  ///< that this rank has
  std::size_t all_specs_ = 0;         ///< of the model
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
