// SPDX-License-Identifier: Apache-2.0
/// Differences that are no longer legal: each kind of benign variation, made larger.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"
#include "suite/record/batches.h"

namespace isoshard {
namespace {

Fault control_of(const char* id, Stage stage) {
  Fault control = find_fault(id);
  control.hooks = {};
  control.expected = {stage, "", {}, {}};
  return control;
}

/// With `bits` of mantissa after the leading one.
at::Tensor rounded(const at::Tensor& x, int bits) {
  const auto [mantissa, exponent] = at::frexp(x.to(at::kFloat));
  const double steps = std::exp2(bits + 1);
  return at::ldexp((mantissa * steps).round() / steps, exponent).to(x.scalar_type());
}

bool is_dp_gradient(const CallInfo& info, const Segment* segment) {
  return info.purpose == Purpose::kGradReduce && info.axis == Axis::kDp && segment != nullptr;
}

/// Summands are rounded to fewer bits than their dtype has.
Fault coarser_summands(const char* id, int bits) {
  Fault control = control_of(id, Stage::kParameterGrad);
  control.hooks.collective = [bits](const Case&) {
    SegmentChange change{.matches = is_dp_gradient};
    change.before = [bits](const InterceptedCall&, Buffer part) {
      tensor_of(part).copy_(rounded(tensor_of(part), bits));
    };
    return change_segments(std::move(change));
  };
  return control;
}

Fault sum_order_control() {
  return coarser_summands("sum_order", 7);
}
Fault bf16_hops_control() {
  return coarser_summands("bf16_hops", 2);
}

Fault bucketing_control() {
  Fault control = control_of("bucketing", Stage::kParameterGrad);
  control.summary = "One element of each gradient is not reduced.";
  control.hooks.collective = [](const Case&) {
    SegmentChange change{.matches = is_dp_gradient};
    change.after = [](const InterceptedCall&, ConstBuffer input, Buffer result) {
      const Buffer own{const_cast<std::byte*>(input.data), input.count, input.dtype};
      tensor_of(result)[-1].copy_(tensor_of(own)[-1]);
    };
    return change_segments(std::move(change));
  };
  return control;
}

Fault signed_zero_control() {
  Fault control = control_of("signed_zero", Stage::kActivationGrad);
  control.summary = "Zeros of gradients are small numbers.";
  control.hooks.tap = [](const Case&, int) -> TapMutation {
    return [](const Site& site, at::Tensor value) {
      const bool hit = site.kind == RecordKind::kActivationGrad && value.eq(0).any().item<bool>();
      return hit ? at::where(value.eq(0), at::full_like(value, 1e-6), value) : value;
    };
  };
  return control;
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
    parts.strategy = strategy_double(
        parts.strategy, {.loss = [probe](const Strategy& inner, const at::Tensor& logits,
                                         const at::Tensor& targets_BS, const at::Tensor& weight_B,
                                         double label_smoothing) {
          at::Tensor fewer = targets_BS.clone();
          fewer[0][5] = -100;
          probe.fired();
          return inner.loss(logits, fewer, weight_B, label_smoothing);
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

Fault fused_rounding_control() {
  Fault control = control_of("fused_rounding", Stage::kForward);
  control.summary = "A kernel rounds rotated queries to fewer bits than bf16 has.";
  control.hooks.tap = [](const Case&, int) -> TapMutation {
    return [](const Site& site, at::Tensor value) {
      if (site.kind != RecordKind::kActivation || !site.name.ends_with("q_rope")) return value;
      return value + (rounded(value, 1) - value).detach();
    };
  };
  return control;
}

Fault adam_sign_control() {
  Fault control = control_of("adam_sign", Stage::kParameterAfterStep);
  control.summary = "Weights whose gradient is far above its noise step to the other side.";
  control.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    const auto step = [probe](Optimizer& inner, NamedTensors& parameters,
                              const NamedTensors& gradients) {
      const at::Tensor before = parameters.at("transformer.ln_f.weight").detach().clone();
      inner.step(parameters, gradients);
      at::Tensor stepped = parameters.at("transformer.ln_f.weight").narrow(0, 0, 1);
      stepped.copy_(2 * before.narrow(0, 0, 1) - stepped);
      probe.fired();
    };
    parts.optimizer = optimizer_double(std::move(parts.optimizer), step);
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
      sum_order_control(),       bf16_hops_control(),       bucketing_control(),
      signed_zero_control(),     padding_content_control(), loss_chunks_control(),
      declared_layout_control(), ragged_epoch_control(),    fused_rounding_control(),
      adam_sign_control(),       clip_form_control()};
  return controls;
}

}  // namespace isoshard
