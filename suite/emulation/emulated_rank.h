// SPDX-License-Identifier: Apache-2.0
/// One emulated rank's training, step by step.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/observe/loss_scaled_sink.h"
#include "fixtures/cases/case.h"
#include "fixtures/inputs/inputs.h"
#include "subjects/checkpoint/checkpoint.h"
#include "subjects/model/model.h"
#include "subjects/model/ops/rng_streams.h"
#include "subjects/optim/learning_rate.h"
#include "subjects/optim/loss_scale.h"
#include "subjects/optim/optimizer.h"
#include "suite/emulation/emulated_strategy.h"
#include "suite/emulation/emulated_world.h"

namespace isoshard {

/// What all emulated ranks share and none changes.
struct EmulatedRun {
  const Case& item;
  const NumericsSpec& numerics;
  const CaseData& data;
  const Model& model;
  const std::vector<ParameterSpec>& specs;
  /// In the dtype of `numerics.precision`
  const std::map<std::string, at::Tensor, std::less<>>& whole_parameters;
  /// Of a case that goes on from one.
  const Checkpoint* resumed = nullptr;
  /// Where tensors of all ranks are; batches and what is counted stay in host memory.
  at::Device device = at::Device(at::DeviceType::CPU);
};

/// Requires     run and world outlive it.
/// Guarantees   through the sink go the records of a training run, in the order and under the names
///              that every subject uses. Layers are never recomputed: that must not change a bit.
/// Ranks        collective over the emulated mesh.
class EmulatedRank {
 public:
  EmulatedRank(const EmulatedRun& run, EmulatedWorld& world, int rank, Sink& sink);
  ~EmulatedRank();
  void setup();
  void train_step(int step);

 private:
  // Of all samples of a step.
  struct Loss {
    std::vector<double> sums;
    std::vector<std::int64_t> counts;
    std::vector<double> weights;  ///< by micro-batch, of its samples
    double backward_sum = 0;      ///< of what backward starts from, with the scale
  };

  // Of one micro-batch: where backward begins, and with which gradient (undefined: that of a loss,
  // 1).
  struct MicroLoss {
    at::Tensor root, gradient, sample_sum_B;
    double value = 0;  ///< of the loss, in its own dtype
  };

  /// Of one stage that runs here: what backward needs of a micro-batch.
  struct StagePass {
    at::Tensor input, result;
  };

  [[nodiscard]] int coordinate(Axis axis) const { return world_->coordinate(rank_, axis); }
  [[nodiscard]] Layout layout_of(const ParameterSpec& spec) const;
  [[nodiscard]] Layout piece_layout(const ParameterSpec& spec) const;
  /// The runs of a flattened part that this dp rank steps; nullopt: all of it.
  [[nodiscard]] std::optional<std::vector<Range>> own_runs(std::string_view parameter) const;
  /// What forward reads: fused weights, of each of its modules, where the numerics have them.
  [[nodiscard]] Parameters forward_parameters() const;
  /// What this rank steps of a tensor like a parameter's part.
  [[nodiscard]] at::Tensor piece_of(std::string_view parameter, const at::Tensor& part) const;
  [[nodiscard]] at::ScalarType master_type() const;
  /// A tensor like a parameter's part in which gradients of micro-batches are added up.
  [[nodiscard]] at::Tensor accumulated_in(const at::Tensor& gradient) const;
  void add_gradients();
  void add_reduced_gradients();
  void reduce_over_dp();
  /// Those of a subject that has reduced nothing yet.
  void make_first_buckets();
  /// Those that are read in one flat buffer (OptimizerSharding::places_in_buffer).
  void place_parameters();
  /// Writes down when this parameter's gradient becomes ready, for the first reduction. A tensor
  /// that takes the parameter's place must be watched anew.
  void watch_gradient(const std::string& name);
  [[nodiscard]] std::vector<std::vector<std::string>> rebuilt_buckets();
  void reduce_bucket(const std::vector<std::string>& bucket, const BucketPlaces* places);
  void reduce_bucket_to_owners(const std::vector<std::string>& bucket);
  /// Whether something else than the parameters as forward reads them is stepped.
  [[nodiscard]] bool has_masters() const;
  void make_masters();
  /// Masters and optimizer state of the checkpoint.
  void resume();
  /// What this rank steps of a whole tensor like a parameter.
  [[nodiscard]] at::Tensor own_piece(const ParameterSpec& spec, const at::Tensor& whole) const;
  void publish();
  void average_over_replicas(const std::vector<std::string>& bucket);
  /// World ranks that step runs of the same parameters, in their order, and those that step the
  /// same runs (ShardGrouping).
  [[nodiscard]] std::vector<int> shard_members() const;
  [[nodiscard]] std::vector<int> replica_members() const;
  [[nodiscard]] std::size_t shard_rank() const;
  [[nodiscard]] Layout over_dp(const at::Tensor& local) const;
  /// One summand of an average over the ranks that reduce gradients.
  void add_averages(Layout& layout) const;
  /// What other pp ranks do not have; `name` of a record that begins with a parameter's.
  void add_place_on_pp(Layout& layout, std::string_view name = {}) const;
  void record(RecordKind kind, std::string name, const at::Tensor& value, Layout layout);
  void record_data(const TokenBatch& batch);
  void record_parameters();
  void record_state();
  void record_accumulated();
  void record_backward(const Loss& loss);
  void record_progress(int step);
  void own_parameters();
  void forward_backward(const std::vector<TokenBatch>& batches, int step);
  void find_own_specs();
  [[nodiscard]] bool is_own(std::size_t stage) const;
  [[nodiscard]] bool has_loss() const;
  [[nodiscard]] at::Tensor over_pp(std::size_t from_stage, const std::string& what,
                                   at::Tensor tensor);
  /// The logits, where this rank has the last stage.
  [[nodiscard]] at::Tensor forward(const TokenBatch& batch, TrainingPass training,
                                   std::vector<StagePass>& passes);
  void backward(const MicroLoss& loss, std::vector<StagePass>& passes);
  /// Of one section of the model.
  [[nodiscard]] at::Tensor result_of(const at::Tensor& input, const TrainingPass& training);
  [[nodiscard]] MicroLoss loss_of(const at::Tensor& logits, const at::Tensor& targets_BS,
                                  double weight);
  [[nodiscard]] double token_weight(const std::vector<std::int64_t>& counts);
  [[nodiscard]] std::vector<double> micro_batch_weights(const std::vector<std::int64_t>& counts,
                                                        std::size_t num_micro_batches);
  void report_loss(Loss& loss);  ///< adds up over cp first
  void reduce_gradients();
  /// What the loss of this step is multiplied with.
  [[nodiscard]] double scale() const { return loss_scale_.has_value() ? loss_scale_->value() : 1; }
  void begin_scaling();
  /// Divides gradients by the scale; whether one was not finite on any rank.
  [[nodiscard]] bool unscale();
  /// `places`: nullptr for one right behind the other.
  void reduce_flat(const std::vector<std::string>& names, const BucketPlaces* places,
                   const std::function<at::Tensor(at::Tensor)>& reduce);
  [[nodiscard]] std::vector<int> holders_of(const std::vector<std::string>& names) const;
  /// Of a parameter that several stages read: the sum of its gradients, in their order.
  void add_shared(const std::string& name, const std::vector<int>& readers);
  [[nodiscard]] double gradient_norm();
  /// NormNumerics::is_torchs.
  [[nodiscard]] double torchs_norm();
  [[nodiscard]] double factor_of(double norm) const;

  const EmulatedRun* run_;
  EmulatedWorld* world_;
  int rank_;
  Sink* sink_;
  EmulatedStrategy strategy_;
  IsFrozen is_frozen_;
  RngStreams streams_;
  LearningRate learning_rate_;
  std::optional<LossScale> loss_scale_;
  std::optional<LossScaledSink> scaled_sink_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<ParameterSpec> specs_;    ///< that this rank has
  std::vector<ParameterSpec> trained_;  ///< those of them that are not frozen
  /// Of these, those whose squares it counts in the norm.
  std::set<std::string, std::less<>> counted_;
  Parameters parameters_;
  /// After the reduction over dp: of the pieces that this rank steps.
  NamedTensors gradients_;
  /// Of micro-batches, if they are added up elsewhere than in the parameters' gradients.
  NamedTensors added_;
  /// Of the first reduction's gradients: indices in model order.
  std::vector<std::int64_t> ready_order_;
  bool is_watching_ = false, is_rebuilt_ = false;
  std::vector<std::vector<std::string>> buckets_;  ///< that gradients are reduced in
  /// Empty where the parameters themselves are stepped.
  NamedTensors masters_;
};

}  // namespace isoshard
