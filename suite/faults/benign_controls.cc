// SPDX-License-Identifier: Apache-2.0
/// Differences that are no longer legal: each kind of benign variation, made larger.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"
#include "suite/record/batches.h"

namespace isoshard {
namespace {

Fault control_of(const char* id, Stage stage) {
  Fault control = find_fault(id);
  control.injections = {};
  control.hooks = {};
  control.expected = {stage, "", {}, {}};
  return control;
}

Fault control_of(const char* id, Stage stage, std::string summary, Injection injection) {
  Fault control = control_of(id, stage);
  control.summary = std::move(summary);
  control.injections = {std::move(injection)};
  return control;
}

/// Gradients are summed from summands of fewer bits than their dtype has.
Fault coarser_summands(const char* id, double bits) {
  return control_of(id, Stage::kParameterGrad, "Summands are rounded.",
                    {.point = FaultPoint::kCollective,
                     .called = {{}, Purpose::kGradReduce, Axis::kDp},
                     .side = FaultSide::kGiven,
                     .change = FaultChange::kRound,
                     .magnitude = bits});
}

Fault padding_content_control() {
  Fault control = control_of("padding_content", Stage::kForward);
  control.summary = "The last row of a shard that is not padding is changed, too.";
  control.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    const std::int64_t last = parts.plan.vocab_shard(mesh.coordinate(Axis::kTp)).count - 1;
    const auto inner = parts.model;
    parts.model = model_double(
        inner, [=](const at::Tensor& ids_BS, const Parameters& parameters, const Strategy& strategy,
                   Sink* sink, const TrainingPass& training) {
          {
            const at::NoGradGuard no_grad;
            parameters.at("lm_head.weight").select(0, last).mul_(1.001);
            probe.fired();
          }
          return inner->forward(ids_BS, parameters, strategy, sink, training);
        });
  };
  return control;
}

Fault loss_chunks_control() {
  Fault control = control_of("loss_chunks", Stage::kForward);
  control.summary = "One target at the border of two chunks is lost.";
  control.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.strategy =
        strategy_double(parts.strategy, {.loss = [probe](const Strategy& inner, LossInputs in) {
                          in.targets_BS = in.targets_BS.clone();
                          in.targets_BS[0][5] = -100;
                          probe.fired();
                          return in.loss_by(inner);
                        }});
  };
  return control;
}

Fault declared_layout_control() {
  Fault control = control_of("declared_layout", Stage::kDataIds);
  control.summary = "The samples are read as if tp were the fast axis.";
  control.hooks.data = [](std::vector<Batch>& micro_batches, const CaseData& data, const Case& item,
                          int rank, int step, const FaultProbe& probe) {
    Case usual = item;
    usual.mesh_order.clear();
    micro_batches = batches_of(usual, data, rank, step);
    probe.fired();
  };
  return control;
}

Fault ragged_epoch_control() {
  Fault control = control_of("ragged_epoch", Stage::kDataIds);
  control.summary = "The sampler drops the end of an epoch that it was declared to fill up.";
  control.hooks.data = [](std::vector<Batch>& micro_batches, const CaseData&, const Case& item,
                          int rank, int step, const FaultProbe& probe) {
    Case dropping = item;
    dropping.data.tail = TailPolicy::kDrop;
    micro_batches = batches_of(dropping, CaseData(dropping), rank, step);
    probe.fired();
  };
  return control;
}

Fault clip_form_control() {
  Fault control = control_of("clip_form", Stage::kParameterAfterStep);
  control.summary = "Gradients are clipped by max_norm / (norm + 1e-3).";
  control.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    const auto norm = std::make_shared<double>(1);
    parts.grad_norm = grad_norm_double(std::move(parts.grad_norm),
                                       [norm](GradNorm& inner, const NamedTensors& gradients) {
                                         *norm = inner.norm(gradients);
                                         return *norm;
                                       });
    const auto step = [norm, probe](Optimizer& inner, NamedTensors& parameters,
                                    const NamedTensors& gradients) {
      NamedTensors clipped_so;
      for (const auto& [name, gradient] : gradients)
        clipped_so[name] = gradient * (*norm / (*norm + 1e-3));
      probe.fired();
      inner.step(parameters, clipped_so);
    };
    parts.optimizer = optimizer_double(std::move(parts.optimizer), step);
  };
  return control;
}

}  // namespace

std::span<const Fault> benign_variation_controls() {
  static const Faults controls{
      coarser_summands("sum_order", 7),
      coarser_summands("bf16_hops", 2),
      control_of("bucketing", Stage::kParameterGrad, "One element of each gradient is not reduced.",
                 {.point = FaultPoint::kCollective,
                  .name = "*",
                  .called = {{}, Purpose::kGradReduce, Axis::kDp},
                  .change = FaultChange::kSkip,
                  .extent = FaultExtent::kElement,
                  .position = 1}),
      control_of("signed_zero", Stage::kActivationGrad, "Zeros of gradients are small numbers.",
                 {.point = FaultPoint::kBackward,
                  .change = FaultChange::kShift,
                  .extent = FaultExtent::kZeros,
                  .magnitude = 1e-3}),
      padding_content_control(),
      loss_chunks_control(),
      declared_layout_control(),
      ragged_epoch_control(),
      control_of("fused_rounding", Stage::kForward,
                 "A kernel rounds rotated queries to fewer bits than bf16 has.",
                 {.point = FaultPoint::kForward,
                  .name = "*q_rope",
                  .change = FaultChange::kRound,
                  .magnitude = 1}),
      control_of("adam_sign", Stage::kParameterAfterStep,
                 "Weights whose gradient is far above its noise step to the other side.",
                 {.point = FaultPoint::kUpdate,
                  .name = "transformer.ln_f.weight",
                  .extent = FaultExtent::kElement,
                  .magnitude = -2}),
      clip_form_control()};
  return controls;
}

}  // namespace isoshard
