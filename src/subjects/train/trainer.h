// SPDX-License-Identifier: Apache-2.0
/// One rank's training of one model, in phases: the single-process reference and every dp x tp
/// subject are this class with other parts.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/mesh/mesh.h"
#include "core/observe/loss_scaled_sink.h"
#include "subjects/checkpoint/checkpoint_io.h"
#include "subjects/data/tokens.h"
#include "subjects/model/model.h"
#include "subjects/model/ops/rng_streams.h"
#include "subjects/model/weights.h"
#include "subjects/optim/learning_rate.h"
#include "subjects/optim/optimizer.h"
#include "subjects/parallel/data_parallel.h"
#include "subjects/parallel/stage_runner.h"
#include "subjects/parallel/tensor/partial_grad_sum.h"
#include "subjects/parallel/tensor/shard_plan.h"
#include "subjects/parallel/token_split.h"
#include "subjects/settings/settings.h"
#include "subjects/train/grad_norm.h"
#include "subjects/train/grad_scaler.h"
#include "subjects/train/loss_normalizer.h"
#include "subjects/train/schedule.h"

namespace isoshard {

/// What a Trainer is made of. Each is a seam that may be replaced from outside.
struct TrainerParts {
  std::shared_ptr<const Model> model;
  std::shared_ptr<const WeightSource> weights;
  std::shared_ptr<const Strategy> strategy;
  ShardPlan plan;  ///< must be the one that `strategy` follows
  std::unique_ptr<LossNormalizer> loss_normalizer;
  std::unique_ptr<GradNorm> grad_norm;
  std::unique_ptr<GradScaler> grad_scaler;  ///< nullptr: the loss is not scaled
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<LearningRate> learning_rate;
  std::shared_ptr<RngStreams> streams;  ///< of dropout
  std::unique_ptr<Schedule> schedule = std::make_unique<Schedule>();
  std::unique_ptr<CheckpointIo> checkpoint_io = std::make_unique<CheckpointIo>();
  std::unique_ptr<PartialGradSum> partial_grad_sum;  ///< nullptr: nothing is split over tp
  /// nullptr: a rank's forward reads all tokens of its samples.
  std::shared_ptr<const TokenSplit> token_split;
  /// nullptr: every rank has all layers.
  std::unique_ptr<StageRunner> stages;
  /// The parameters that this rank has, in model order; none: all of the model's.
  std::optional<std::vector<ParameterSpec>> own_parameters;
  /// Of a parameter's name; frozen ones have no gradient, no optimizer state and no step. Empty:
  /// none is frozen.
  IsFrozen is_frozen;
  /// How parameters, gradients and optimizer state lie over dp.
  std::unique_ptr<DataParallel> data_parallel;
  std::int64_t bucket_bytes = 25 << 20;
  std::optional<Dtype> master_dtype;  ///< of what the optimizer steps; none: `dtype`
  double max_grad_norm = 1.0;         ///< 0: no clipping
  double label_smoothing = 0;
  /// The number of dp ranks that this rank's samples stand for; more than 1 in the reference only.
  int num_loss_groups = 1;
  /// A forward pass has the samples of one of those dp ranks, in turn, and not of each.
  bool takes_turns = false;
  Dtype dtype = Dtype::kFloat32;      ///< of the parameters, and so of the computation
  std::optional<Dtype> autocast;      ///< forward runs under autocast of this dtype
  std::optional<Dtype> output_dtype;  ///< logits are converted to it before the loss
  int recompute_every = 0;  ///< so many layers have one that is run again in backward; 0: none
  /// Whether "<parameter>.clipped" and "<parameter>.read" are recorded; what they must be follows
  /// from the other records of a reference.
  bool records_repetitions = true;
  /// Where parameters, activations, gradients and optimizer state are. Batches, scalars and masks
  /// are made in host memory and go there.
  at::Device device = at::Device(at::kCPU);
  std::string training;  ///< what checkpoints say of the run (RunProgress::training)
};

/// Requires     the mesh outlives it; phases are called in the order setup, then per step
///              forward_backward, reduce_gradients, clip, step, state.
/// Guarantees   a rank reads and holds only its own part of each parameter. Through the sink go,
///              per step: parameters as read (first step), "sample_ids", "input_ids" and "labels",
///              every dropout mask, every activation and its gradient, "loss" and
///              "loss_per_dp_rank", parameter gradients after the reduction and before clipping,
///              "grad_norm", gradients as the optimizer gets them ("<parameter>.clipped", if there
///              is clipping), what each micro-batch but the last one has added up to
///              ("<parameter>.micro_batch", as it is kept: scaled with the loss, and where it is
///              not reduced yet a partial average over dp), "learning_rate", optimizer state (with
///              masters, if they have a dtype of their own, as "<parameter>.master"), parameters
///              after the step, "optimizer_steps" (the fewest and the most updates of a parameter,
///              if the rule counts them) and "rng_state" (seed and next step of the masks).
///              "loss_backward" is the sum of what backward started from, times what it started
///              with. From the second step on
///              "<parameter>.read" is what the first forward of a step reads. A parameter
///              that no gradient reached has a gradient of zeros. With loss scaling "loss_scale"
///              and, after the gradients, "found_inf" (1 or 0) are recorded; gradients are unscaled
///              before they are recorded, and a step whose gradients are not finite on some rank
///              changes nothing but the scale: parameters, masters, optimizer state and its count
///              of steps stay. The learning rate's schedule continues.
/// Ranks        every phase is collective over the mesh.
/// Determinism  bit-equal between runs for the communicator's ordered reduction.
///
///     Trainer trainer(autotp_parts(config, mesh), mesh, sink);
///     trainer.setup();
///     trainer.train_step({&batch, 1});
class Trainer {
 public:
  Trainer(TrainerParts parts, Mesh& mesh, Sink* sink);
  ~Trainer();

  void setup();
  /// Replaces setup: resumes from a checkpoint of any mesh and subject. Stepped tensors start from
  /// `weights`, which must be those of the checkpoint (CheckpointWeights); optimizer state, steps
  /// and random streams are the checkpoint's. The state is recorded as that of the last step done;
  /// of a checkpoint of step 0, as setup does.
  /// Errors   FileError that starts with the file (docs/reference/checkpoints.md lists them).
  void resume(const std::filesystem::path& folder);
  /// Writes a checkpoint for resume. Call it between steps.   Errors   as CheckpointIo::write.
  void save(const std::filesystem::path& folder) const;
  /// Forward and backward of every micro-batch; gradients add up.
  /// The loss is the mean over all of them; only the last backward starts reductions.
  /// Errors   UsageError for no micro-batch, no counted token, or a micro-batch that does not
  ///          divide by the loss groups.
  void forward_backward(std::span<const TokenBatch> micro_batches);
  void reduce_gradients();
  void clip();
  void step();
  void state();
  void train_step(std::span<const TokenBatch> micro_batches);
  /// The loss of these batches, as forward_backward has it, with nothing dropped, nothing recorded,
  /// no gradient.
  /// Errors   as forward_backward.
  [[nodiscard]] double evaluate(std::span<const TokenBatch> micro_batches);
  /// Whether the next steps drop and recompute (at first they do).
  void set_training(bool training) noexcept { is_training_ = training; }

  /// The parameters that forward reads, or this rank's pieces of them (DataParallel::held).
  [[nodiscard]] const Parameters& parameters() const { return parts_.data_parallel->held(); }
  /// The gradients of this rank's pieces in the last step.
  [[nodiscard]] const NamedTensors& gradients() const noexcept { return gradients_; }
  [[nodiscard]] const std::vector<ParameterSpec>& specs() const noexcept { return specs_; }
  /// Those of them that are not frozen.
  [[nodiscard]] const std::vector<ParameterSpec>& trained() const noexcept { return trained_; }
  /// The loss of the last step (averaged over dp), and below it the norm before clipping.
  [[nodiscard]] double loss() const noexcept { return loss_; }
  [[nodiscard]] double grad_norm() const noexcept { return grad_norm_; }
  /// Whether the last step was skipped.
  [[nodiscard]] bool found_inf() const noexcept { return found_inf_; }

 private:
  /// Summed token losses, weights and counts of this rank's samples, and where each stands in its
  /// micro-batch.
  ///
  /// One loss group after the other, in each all its micro-batches in order: what a dp rank sees,
  /// for each dp rank that this one stands for.
  struct LossSums {
    std::vector<double> sums, weights;
    std::vector<std::int64_t> counts;
    std::vector<std::vector<std::size_t>> places;  ///< by micro-batch and sample
  };

  struct MicroBatch {
    const TokenBatch* batch = nullptr;
    at::Tensor targets_BS;  ///< of all tokens
    std::int64_t earlier_samples = 0;
  };
  class StagePasses;  ///< of micro-batches through the sections of a pipeline's rank
  void run_micro_batch(MicroBatchPlace place, MicroBatch& micro_batch, LossSums& sums);
  void run_stages(std::vector<MicroBatch>& micro_batches, MicroBatchPlace place, LossSums& sums);
  void evaluate_stages(std::span<const TokenBatch> micro_batches,
                       std::span<const at::Tensor> targets, LossSums& sums);
  /// What activations pass.
  [[nodiscard]] Sink* pass_sink() noexcept {
    return scaled_sink_.has_value() ? &*scaled_sink_ : sink_;
  }
  /// In host memory, as `whole_BS` is; below it the same on the device.
  [[nodiscard]] at::Tensor own_tokens(const at::Tensor& whole_BS) const;
  [[nodiscard]] at::Tensor own_tokens_on_device(const at::Tensor& whole_BS) const;
  /// What the backward pass of a loss starts with.
  [[nodiscard]] at::Tensor seed_of(const at::Tensor& loss) const;
  void set_up_parameters();
  void restore_masters();
  [[nodiscard]] NamedTensors read_state(const Checkpoint& checkpoint) const;
  void record(RecordKind kind, std::string name, const at::Tensor& value, Layout layout) const;
  void record_parameters() const;
  void record_read(std::string_view name, const at::Tensor& read) const;
  void record_clipped() const;
  /// `stage`: of the parameters of this section.
  void record_accumulated(std::optional<std::size_t> stage = {}) const;
  void record_backward(double sum) const;
  void record_progress() const;
  void record_data(const TokenBatch& batch) const;
  /// Records the scale of the step, and declares it to the sink for the records of the step.
  void begin_scaling();
  /// This rank's part of a parameter; what pads a vocabulary is zero.
  [[nodiscard]] at::Tensor own_part(const ParameterSpec& spec, at::ScalarType type) const;
  [[nodiscard]] at::Tensor logits_of(const TokenBatch& batch, Sink* sink,
                                     const TrainingPass& training);
  /// The result of a section of the model, or of all of it: logits or what the next section takes.
  [[nodiscard]] at::Tensor result_of(const at::Tensor& input, Sink* sink,
                                     const TrainingPass& training);
  [[nodiscard]] TrainingPass training_pass(int step, const MicroBatch& micro_batch) const;
  [[nodiscard]] TrainingPass evaluation_pass(const TokenBatch& batch) const;
  [[nodiscard]] LossSums weigh(std::span<const at::Tensor> targets) const;
  [[nodiscard]] at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets_BS,
                                   std::span<const std::size_t> places, LossSums& sums) const;
  [[nodiscard]] double mean_loss(const LossSums& sums) const;
  void add_shared_tokens(LossSums& sums) const;
  void report_loss(LossSums& sums);
  [[nodiscard]] Layout layout_of(const ParameterSpec& spec) const {
    return parts_.plan.layout_of(spec, mesh_->coordinate(Axis::kTp));
  }
  [[nodiscard]] Layout over_dp(const at::Tensor& local) const;
  void add_averages(Layout& layout) const;
  void add_place_on_pp(Layout& layout, std::string_view name = {}) const;
  /// False if another rank of the pipeline records this; else the layout says who does.
  [[nodiscard]] bool add_stage(Layout& layout) const;

  TrainerParts parts_;
  Mesh* mesh_;
  Sink* sink_;
  std::vector<ParameterSpec> specs_, trained_;
  NamedTensors gradients_;
  bool is_training_ = true;
  std::optional<LossScaledSink> scaled_sink_;  ///< what activations pass, if the loss is scaled
  bool found_inf_ = false;                     ///< in the last step's gradients, on any rank
  bool is_reading_ = false;                    ///< the first forward of a later step
  int next_step_ = 0;
  double scale_ = 1;  ///< of the loss, as declared for the step
  double loss_ = 0, grad_norm_ = 0;
  double backward_sum_ = 0;  ///< of what backward started from in this step, with the scale
};

}  // namespace isoshard
