// SPDX-License-Identifier: Apache-2.0
/// The stand-ins.
#include "suite/faults/test_doubles.h"

#include <ATen/ATen.h>

#include <utility>

#include "core/comm/tensor.h"
#include "core/observe/layer_name.h"
#include "subjects/optim/wrapped_optimizer.h"
#include "subjects/parallel/wrapped_data_parallel.h"
#include "suite/record/make_subject.h"

namespace isoshard {
namespace {

class OptimizerDouble final : public WrappedOptimizer {
 public:
  OptimizerDouble(std::unique_ptr<Optimizer> inner, OptimizerStep step)
      : WrappedOptimizer(std::move(inner)), step_(std::move(step)) {}
  void step(NamedTensors& parameters, const NamedTensors& gradients) override {
    step_(inner(), parameters, gradients);
  }

 private:
  OptimizerStep step_;
};

class GradNormDouble final : public GradNorm {
 public:
  GradNormDouble(std::unique_ptr<GradNorm> inner, NormFunction norm)
      : inner_(std::move(inner)), norm_(std::move(norm)) {}
  double norm(const NamedTensors& gradients) override { return norm_(*inner_, gradients); }
  double factor(double norm, double max_norm) override { return inner_->factor(norm, max_norm); }

 private:
  std::unique_ptr<GradNorm> inner_;
  NormFunction norm_;
};

class LossNormalizerDouble final : public LossNormalizer {
 public:
  LossNormalizerDouble(std::unique_ptr<LossNormalizer> inner, LossWeights weights)
      : inner_(std::move(inner)), weights_(std::move(weights)) {}
  std::vector<double> weights(std::span<const std::int64_t> counts) override {
    return weights_(*inner_, counts);
  }

 private:
  std::unique_ptr<LossNormalizer> inner_;
  LossWeights weights_;
};

class ScheduleDouble final : public Schedule {
 public:
  explicit ScheduleDouble(ScheduleRules rules) : rules_(std::move(rules)) {}
  bool clears_gradients_before(const MicroBatchPlace& place) override {
    return rules_.clears ? rules_.clears(place) : Schedule::clears_gradients_before(place);
  }
  bool reduces_gradients_in(const MicroBatchPlace& place) override {
    return rules_.reduces ? rules_.reduces(place) : Schedule::reduces_gradients_in(place);
  }

 private:
  ScheduleRules rules_;
};

class DataParallelDouble final : public WrappedDataParallel {
 public:
  DataParallelDouble(std::unique_ptr<DataParallel> inner, DataParallelRules rules)
      : WrappedDataParallel(std::move(inner)), rules_(std::move(rules)) {}
  void clear_gradients() override {
    if (rules_.clear_gradients) {
      rules_.clear_gradients(inner(), step_);
    } else {
      inner().clear_gradients();
    }
  }
  const NamedTensors& before_forward() override {
    if (rules_.before_forward) rules_.before_forward(inner(), step_);
    return inner().before_forward();
  }
  void before_backward(bool reduces) override {
    if (rules_.after_forward) rules_.after_forward(inner(), step_);
    inner().before_backward(reduces);
  }
  void publish() override {
    inner().publish();
    ++step_;
  }

 private:
  DataParallelRules rules_;
  int step_ = 0;
};

class CheckpointDouble final : public CheckpointIo {
 public:
  CheckpointDouble(std::unique_ptr<CheckpointIo> inner, CheckpointRules rules)
      : inner_(std::move(inner)), rules_(std::move(rules)) {}
  void write(const std::filesystem::path& folder, const RunProgress& progress,
             const std::vector<SavedPart>& parts, Mesh& mesh) const override {
    inner_->write(folder, progress, parts, mesh);
  }
  RunProgress progress(const Checkpoint& checkpoint, const Mesh& mesh) const override {
    return rules_.progress ? rules_.progress(*inner_, checkpoint, mesh)
                           : inner_->progress(checkpoint, mesh);
  }
  void read(const Checkpoint& checkpoint, std::string_view name, const Layout& layout,
            const Mesh& mesh, at::Tensor local) const override {
    if (rules_.read) {
      rules_.read(*inner_, checkpoint, name, layout, mesh, std::move(local));
    } else {
      inner_->read(checkpoint, name, layout, mesh, std::move(local));
    }
  }

 private:
  std::unique_ptr<CheckpointIo> inner_;
  CheckpointRules rules_;
};

class ModelDouble final : public Model {
 public:
  ModelDouble(std::shared_ptr<const Model> inner, ForwardFunction forward)
      : inner_(std::move(inner)), forward_(std::move(forward)) {}
  const ModelConfig& config() const noexcept override { return inner_->config(); }
  std::vector<ParameterSpec> parameters() const override { return inner_->parameters(); }
  std::vector<std::string> hidden_state_points() const override {
    return inner_->hidden_state_points();
  }
  LossKind loss_kind() const noexcept override { return inner_->loss_kind(); }
  at::Tensor forward(const at::Tensor& input_ids_BS, const Parameters& parameters,
                     const Strategy& strategy, Sink* sink,
                     const TrainingPass& training) const override {
    return forward_(input_ids_BS, parameters, strategy, sink, training);
  }

 private:
  std::shared_ptr<const Model> inner_;
  ForwardFunction forward_;
};

class WeightsDouble final : public WeightSource {
 public:
  WeightsDouble(std::shared_ptr<const WeightSource> inner, ReadFunction read)
      : inner_(std::move(inner)), read_(std::move(read)) {}
  at::Tensor read(const ParameterSpec& spec, const Shape& offset,
                  const Shape& size) const override {
    return read_(*inner_, spec, offset, size);
  }

 private:
  std::shared_ptr<const WeightSource> inner_;
  ReadFunction read_;
};

class StrategyDouble final : public Strategy {
 public:
  StrategyDouble(std::shared_ptr<const Strategy> inner, StrategyRules rules)
      : Strategy(inner->dp_degree(), inner->activation_grad_scale()),
        inner_(std::move(inner)),
        rules_(std::move(rules)) {}
  at::Tensor linear(std::string_view module, const at::Tensor& x, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias, Sink* sink) const override {
    return rules_.linear ? rules_.linear(*inner_, module, x, weight, bias, sink)
                         : inner_->linear(module, x, weight, bias, sink);
  }
  at::Tensor embedding(std::string_view module, const at::Tensor& ids_BS, const at::Tensor& weight,
                       Sink* sink) const override {
    return inner_->embedding(module, ids_BS, weight, sink);
  }
  CrossEntropy loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                    const at::Tensor& weight_B, double label_smoothing) const override {
    return rules_.loss ? rules_.loss(*inner_, logits, targets_BS, weight_B, label_smoothing)
                       : inner_->loss(logits, targets_BS, weight_B, label_smoothing);
  }
  bool splits_output(std::string_view module) const override {
    return inner_->splits_output(module);
  }
  int tp_degree() const noexcept override { return inner_->tp_degree(); }
  void enter_block(std::string_view module) const override { inner_->enter_block(module); }
  at::Tensor leave_block(std::string_view module, at::Tensor output) const override {
    return inner_->leave_block(module, std::move(output));
  }
  ActivationLayouts activation_layouts(std::string_view point, const at::Tensor& local,
                                       int tp_dim) const override {
    return inner_->activation_layouts(point, local, tp_dim);
  }
  Layout over_context(Layout layout, const at::Tensor& local, int sequence_dim) const override {
    return inner_->over_context(std::move(layout), local, sequence_dim);
  }
  at::Tensor attention(std::string_view module, const at::Tensor& q_BNSD, const at::Tensor& k_BKSD,
                       const at::Tensor& v_BKSD, AttentionImpl impl, SoftmaxDtype softmax,
                       const AttentionDropout& dropout) const override {
    if (rules_.attention)
      return rules_.attention(*inner_, module, {q_BNSD, k_BKSD, v_BKSD, impl, softmax, dropout});
    return inner_->attention(module, q_BNSD, k_BKSD, v_BKSD, impl, softmax, dropout);
  }
  KeysValues whole_context(std::string_view module, const at::Tensor& k_BKSD,
                           const at::Tensor& v_BKSD) const override {
    return inner_->whole_context(module, k_BKSD, v_BKSD);
  }
  at::Tensor token_positions(std::int64_t length) const override {
    return rules_.token_positions ? rules_.token_positions(*inner_, length)
                                  : inner_->token_positions(length);
  }
  std::int64_t sequence_length(std::int64_t length) const override {
    return inner_->sequence_length(length);
  }

 private:
  std::shared_ptr<const Strategy> inner_;
  StrategyRules rules_;
};

}  // namespace

std::unique_ptr<Optimizer> optimizer_double(std::unique_ptr<Optimizer> inner, OptimizerStep step) {
  return std::make_unique<OptimizerDouble>(std::move(inner), std::move(step));
}

std::unique_ptr<GradNorm> grad_norm_double(std::unique_ptr<GradNorm> inner, NormFunction norm) {
  return std::make_unique<GradNormDouble>(std::move(inner), std::move(norm));
}

std::unique_ptr<LossNormalizer> loss_normalizer_double(std::unique_ptr<LossNormalizer> inner,
                                                       LossWeights weights) {
  return std::make_unique<LossNormalizerDouble>(std::move(inner), std::move(weights));
}

std::unique_ptr<DataParallel> data_parallel_double(std::unique_ptr<DataParallel> inner,
                                                   DataParallelRules rules) {
  return std::make_unique<DataParallelDouble>(std::move(inner), std::move(rules));
}

std::unique_ptr<CheckpointIo> checkpoint_double(std::unique_ptr<CheckpointIo> inner,
                                                CheckpointRules rules) {
  return std::make_unique<CheckpointDouble>(std::move(inner), std::move(rules));
}

std::unique_ptr<Schedule> schedule_double(ScheduleRules rules) {
  return std::make_unique<ScheduleDouble>(std::move(rules));
}

std::unique_ptr<Schedule> place_watcher(std::shared_ptr<MicroBatchPlace> place) {
  return schedule_double({.clears = [place = std::move(place)](const MicroBatchPlace& current) {
    *place = current;
    return Schedule().clears_gradients_before(current);
  }});
}

bool reduces_every_micro_batch(const Case& item) {
  return declares_numerics(item) && numerics_of(item).data.accumulation.reduces_every_micro_batch;
}

std::shared_ptr<const Model> model_double(std::shared_ptr<const Model> inner,
                                          ForwardFunction forward) {
  return std::make_shared<ModelDouble>(std::move(inner), std::move(forward));
}

std::shared_ptr<const WeightSource> weights_double(std::shared_ptr<const WeightSource> inner,
                                                   ReadFunction read) {
  return std::make_shared<WeightsDouble>(std::move(inner), std::move(read));
}

std::shared_ptr<const Strategy> strategy_double(std::shared_ptr<const Strategy> inner,
                                                StrategyRules rules) {
  return std::make_shared<StrategyDouble>(std::move(inner), std::move(rules));
}

std::shared_ptr<const Model> accumulation_double(std::shared_ptr<const Model> inner,
                                                 int micro_batches, GradientEdit edit) {
  const auto passes = std::make_shared<int>(0);
  return model_double(
      inner, [=, edit = std::move(edit)](const at::Tensor& ids_BS, const Parameters& parameters,
                                         const Strategy& strategy, Sink* sink,
                                         const TrainingPass& training) {
        if (const int micro_batch = (*passes)++ % micro_batches; micro_batch > 0)
          edit(parameters, micro_batch);
        return inner->forward(ids_BS, parameters, strategy, sink, training);
      });
}

at::Tensor counted(const FaultProbe& probe, const at::Tensor& right, at::Tensor wrong) {
  if (!at::equal(right, wrong)) probe.fired();
  return wrong;
}

at::Tensor tensor_of(const Buffer& buffer) {
  return at::from_blob(buffer.data, {buffer.count}, scalar_type_of(buffer.dtype));
}

std::set<std::string> first_row_biases(const Case& item) {
  std::set<std::string> layers, biases;
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    if (spec.param_class == ParamClass::kRowBias && layers.emplace(layer_of(spec.name)).second)
      biases.insert(spec.name);
  }
  return biases;
}

bool is_in_last_layer(const Case& item, std::string_view name) {
  const std::string number = std::to_string(item.config.num_layers - 1);
  return name.find(".layers." + number + ".") != std::string_view::npos ||
         name.find(".h." + number + ".") != std::string_view::npos;
}

bool is_token_embedding(std::string_view module) {
  return module.ends_with("embed_tokens") || module.ends_with("transformer.wte") ||
         module.ends_with("word_embeddings");
}

}  // namespace isoshard
