// SPDX-License-Identifier: Apache-2.0
/// The stand-ins.
#include "conformance/detection/twins.h"

#include <ATen/ATen.h>

#include <utility>

#include "comm/tensor.h"

namespace isoshard {
namespace {

class OptimizerTwin final : public Optimizer {
 public:
  OptimizerTwin(std::unique_ptr<Optimizer> inner, OptimizerStep step) : inner_(std::move(inner)), step_(std::move(step)) {}
  void step(NamedTensors& parameters, const NamedTensors& gradients) override { step_(*inner_, parameters, gradients); }
  NamedTensors state() const override { return inner_->state(); }

 private:
  std::unique_ptr<Optimizer> inner_;
  OptimizerStep step_;
};

class GradNormTwin final : public GradNorm {
 public:
  GradNormTwin(std::unique_ptr<GradNorm> inner, NormFunction norm) : inner_(std::move(inner)), norm_(std::move(norm)) {}
  double norm(const NamedTensors& gradients) override { return norm_(*inner_, gradients); }

 private:
  std::unique_ptr<GradNorm> inner_;
  NormFunction norm_;
};

class LossNormaliserTwin final : public LossNormaliser {
 public:
  LossNormaliserTwin(std::unique_ptr<LossNormaliser> inner, LossWeights weights) : inner_(std::move(inner)), weights_(std::move(weights)) {}
  std::vector<double> weights(std::span<const std::int64_t> counts) override { return weights_(*inner_, counts); }

 private:
  std::unique_ptr<LossNormaliser> inner_;
  LossWeights weights_;
};

class ScheduleTwin final : public Schedule {
 public:
  explicit ScheduleTwin(ScheduleRules rules) : rules_(std::move(rules)) {}
  bool clears_gradients_before(const MicroBatchPlace& place) override {
    return rules_.clears ? rules_.clears(place) : Schedule::clears_gradients_before(place);
  }
  bool reduces_gradients_in(const MicroBatchPlace& place) override {
    return rules_.reduces ? rules_.reduces(place) : Schedule::reduces_gradients_in(place);
  }

 private:
  ScheduleRules rules_;
};

class ModelTwin final : public Model {
 public:
  ModelTwin(std::shared_ptr<const Model> inner, ForwardFunction forward) : inner_(std::move(inner)), forward_(std::move(forward)) {}
  const ModelConfig& config() const noexcept override { return inner_->config(); }
  std::vector<ParameterSpec> parameters() const override { return inner_->parameters(); }
  std::vector<std::string> hidden_state_points() const override { return inner_->hidden_state_points(); }
  at::Tensor forward(const at::Tensor& input_ids_BS, const Parameters& parameters, const Strategy& strategy, Sink* sink) const override {
    return forward_(input_ids_BS, parameters, strategy, sink);
  }

 private:
  std::shared_ptr<const Model> inner_;
  ForwardFunction forward_;
};

}  // namespace

std::unique_ptr<Optimizer> optimizer_twin(std::unique_ptr<Optimizer> inner, OptimizerStep step) {
  return std::make_unique<OptimizerTwin>(std::move(inner), std::move(step));
}

std::unique_ptr<GradNorm> grad_norm_twin(std::unique_ptr<GradNorm> inner, NormFunction norm) {
  return std::make_unique<GradNormTwin>(std::move(inner), std::move(norm));
}

std::unique_ptr<LossNormaliser> loss_normaliser_twin(std::unique_ptr<LossNormaliser> inner, LossWeights weights) {
  return std::make_unique<LossNormaliserTwin>(std::move(inner), std::move(weights));
}

std::unique_ptr<Schedule> schedule_twin(ScheduleRules rules) {
  return std::make_unique<ScheduleTwin>(std::move(rules));
}

std::shared_ptr<const Model> model_twin(std::shared_ptr<const Model> inner, ForwardFunction forward) {
  return std::make_shared<ModelTwin>(std::move(inner), std::move(forward));
}

at::Tensor tensor_of(const Buffer& buffer) {
  return at::from_blob(buffer.data, {buffer.count}, scalar_type_of(buffer.dtype));
}

}  // namespace isoshard
