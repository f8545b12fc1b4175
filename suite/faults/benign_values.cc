// SPDX-License-Identifier: Apache-2.0
/// Legal differences in values: signs of zero, what pads a vocabulary, pieces of the loss, finer
/// roundings, forms of clipping, steps whose sign is chance.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

#include "subjects/model/ops/ops.h"
#include "subjects/optim/clip.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Injection zeros_negated(FaultPoint point) {
  return {.point = point, .extent = FaultExtent::kZeros, .magnitude = -2};
}

/// Keys are the second third of GPT-2's fused q, k and v.
Injection key_biases_negated(Injection injection) {
  injection.name = "*c_attn.bias";
  injection.extent = FaultExtent::kSecondThird;
  injection.magnitude = -2;
  return injection;
}

Fault loss_in_runs(std::string id, std::string summary, double count, Case (*smallest_case)()) {
  return {.id = std::move(id),
          .subjects = {"ddp", "autotp"},
          .summary = std::move(summary),
          .smallest_case = smallest_case,
          .injections = {
              {.point = FaultPoint::kLoss, .change = FaultChange::kSplit, .magnitude = count}}};
}

/// A tiny Llama with 97 entries of vocabulary, padded to 2 x 64.
Case padded_vocabulary_case() {
  Case item = fault_case("llama", "autotp", {.dp = 3, .tp = 2});
  item.config.vocab_size = 97;
  item.model_name += "_v97";
  item.settings.make_vocab_size_divisible_by = 64;
  return item;
}

Fault padding_content() {
  Fault miss{.id = "padding_content", .subjects = {"autotp"}};
  miss.summary = "The rows that pad a split vocabulary hold large numbers instead of zeros.";
  miss.smallest_case = padded_vocabulary_case;
  miss.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    const VocabShard shard = parts.plan.vocab_shard(mesh.coordinate(Axis::kTp));
    const auto inner = parts.model;
    parts.model = model_double(inner, [=](const at::Tensor& ids_BS, const Parameters& parameters,
                                          const Strategy& strategy, Sink* sink,
                                          const TrainingPass& training) {
      const at::NoGradGuard no_grad;
      for (const ParameterSpec& spec : inner->parameters()) {
        if (spec.tp.role != TpRole::kVocab || shard.rows == shard.count) continue;
        at::Tensor padding =
            parameters.at(spec.name).narrow(spec.tp.dim, shard.count, shard.rows - shard.count);
        padding.copy_(at::arange(padding.numel(), at::kDouble).sin().view(padding.sizes()) * 1e4);
        probe.fired();
      }
      const at::AutoGradMode with_grad(true);
      return inner->forward(ids_BS, parameters, strategy, sink, training);
    });
  };
  return miss;
}

/// The sum over dp, divided by dp after the reduction, which rounds once more.
class SumThenDivide final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllReduce && call.info.purpose == Purpose::kGradReduce &&
           call.reduction == Reduction::kAvg;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    call.comm->all_reduce(call.output, Reduction::kSum, call.info).wait();
    tensor_of(call.output).div_(call.comm->size());
    return {};
  }
};

Fault loss_chunks_divided_late() {
  Fault miss{.id = "loss_chunks_divided_late", .subjects = {"ddp", "autotp"}};
  miss.summary =
      "The sum of token losses goes backward undivided; gradients are divided by tokens and by dp "
      "after the reduction.";
  miss.smallest_case = [] { return fault_case("qwen2", "ddp", {.dp = 3}); };
  miss.hooks.collective = [](const Case&) { return std::make_shared<SumThenDivide>(); };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.strategy =
        strategy_double(parts.strategy, {.loss = [probe](const Strategy& inner, LossInputs in) {
                          // the mean over all tokens has one weight for all samples
                          const double weight = in.weight_B[0].item<double>();
                          in.weight_B = at::ones_like(in.weight_B);
                          CrossEntropy loss = in.loss_by(inner);
                          loss.loss = loss.loss * weight;
                          probe.fired();
                          return loss;
                        }});
  };
  return miss;
}

/// Norms of heads and rotary steps whose values stay in fp32 from the projection to the rotated
/// heads. The points between are rounded where they are recorded only.
class FusedHeads final : public Sink {
 public:
  FusedHeads(Sink& inner, const ModelConfig& config, const Parameters& parameters, FaultProbe probe)
      : inner_(inner), config_(config), parameters_(parameters), probe_(std::move(probe)) {}
  void begin_step(int step) override { inner_.begin_step(step); }
  at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    return inner_.on_activation_grad(site, std::move(gradient));
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    inner_.on_record(site, value);
  }

  at::Tensor on_activation(const Site& site, at::Tensor value) override {
    const std::string_view point = std::string_view(site.name).substr(site.name.rfind('.') + 1);
    if (point == "q_proj" || point == "k_proj") {
      at::Tensor recorded = inner_.on_activation(site, std::move(value));
      wide_[point[0]] = recorded.to(at::kFloat).unflatten(-1, {-1, config_.head_dim});
      return recorded;
    }
    if (point == "q_norm" || point == "k_norm") {
      const at::Tensor& x = wide_.at(point[0]);
      const at::Tensor normed = parameters_.at(site.name + ".weight").to(at::kFloat) * x *
                                at::rsqrt(x.pow(2).mean(-1, /*keepdim=*/true) + config_.norm_eps);
      at::Tensor recorded = inner_.on_activation(site, normed.to(value.scalar_type()));
      // The value is the one before rounding, the gradient goes by the recorded point.
      const at::Tensor rounded = recorded.to(at::kFloat);
      wide_[point[0]] = rounded + (normed - rounded).detach();
      probe_.fired();
      return recorded;
    }
    if (point == "q_rope" || point == "k_rope") {
      const RotaryTables tables =
          rotary_tables(config_.rope, config_.head_dim, value.size(2), at::kFloat);
      probe_.fired();
      return inner_.on_activation(
          site, apply_rotary(wide_.at(point[0]).transpose(1, 2), tables).to(value.scalar_type()));
    }
    return inner_.on_activation(site, std::move(value));
  }

 private:
  Sink& inner_;
  const ModelConfig& config_;
  const Parameters& parameters_;
  FaultProbe probe_;
  std::map<char, at::Tensor> wide_;  ///< of the layer under way, by q and k: [B,S,heads,D]
};

Fault fused_rounding() {
  Fault miss{.id = "fused_rounding", .subjects = {"ddp", "autotp"}};
  miss.summary =
      "A fused kernel keeps fp32 through head norm and rotary step, where the reference rounds to "
      "bf16 four times.";
  miss.smallest_case = [] {
    Case item = fault_case("qwen3", "autotp", {.dp = 3, .tp = 2});
    item.dtype = Dtype::kBFloat16;
    return item;
  };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    // backward calls it, too
    const auto sink_of_pass = std::make_shared<std::unique_ptr<FusedHeads>>();
    const auto inner = parts.model;
    parts.model = model_double(
        inner, [=](const at::Tensor& ids_BS, const Parameters& parameters, const Strategy& strategy,
                   Sink* sink, const TrainingPass& training) {
          if (sink == nullptr) return inner->forward(ids_BS, parameters, strategy, sink, training);
          *sink_of_pass = std::make_unique<FusedHeads>(*sink, inner->config(), parameters, probe);
          return inner->forward(ids_BS, parameters, strategy, sink_of_pass->get(), training);
        });
  };
  return miss;
}

Fault clip_form() {
  Fault miss{.id = "clip_form", .subjects = {"ddp", "autotp"}};
  miss.summary =
      "Gradients are clipped by max_norm / norm instead of max_norm / (norm + 1e-6), with a norm "
      "rounded to fp32.";
  miss.smallest_case = [] { return clipped(fault_case("qwen2", "autotp", {.dp = 2, .tp = 3})); };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    const auto norm = std::make_shared<double>(1);
    parts.grad_norm = grad_norm_double(
        std::move(parts.grad_norm), [norm](GradNorm& inner, const NamedTensors& gradients) {
          *norm = static_cast<double>(static_cast<float>(inner.norm(gradients)));
          return *norm;
        });
    const auto step = [norm, probe](Optimizer& inner, NamedTensors& parameters,
                                    const NamedTensors& gradients) {
      NamedTensors clipped_so;
      for (const auto& [name, gradient] : gradients)
        clipped_so[name] = gradient * ((*norm + 1e-6) / *norm);
      probe.fired();
      inner.step(parameters, clipped_so);
    };
    parts.optimizer = optimizer_double(std::move(parts.optimizer), step);
  };
  return miss;
}

Fault clip_form_norm_of_norms() {
  Fault miss{.id = "clip_form_norm_of_norms", .subjects = {"ddp"}};
  miss.summary =
      "The norm is that of the tensors' norms in fp32, and gradients that need no clipping are "
      "scaled by 1.";
  miss.smallest_case = [] {
    Case item = fault_case("qwen2", "ddp", {.dp = 3});
    item.settings.max_grad_norm = 1000;
    return item;
  };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.grad_norm = grad_norm_double(
        std::move(parts.grad_norm), [probe](GradNorm&, const NamedTensors& gradients) {
          std::vector<at::Tensor> norms;
          for (const auto& [name, gradient] : gradients) {
            norms.push_back(at::linalg_vector_norm(gradient));
            gradient.mul_(1.0);
          }
          probe.fired();
          return at::linalg_vector_norm(at::stack(norms)).item<double>();
        });
  };
  return miss;
}

}  // namespace

void add_value_benign_variations(Faults& faults) {
  faults.push_back(
      {.id = "signed_zero",
       .subjects = {"ddp", "autotp"},
       .summary = "Zeros have the other sign.",
       .smallest_case =
           [] {
             Case item = fault_case("qwen2", "autotp", {.dp = 3, .tp = 2});
             // masked positions have gradients of zero
             item.data.unequal_labels = true;
             return item;
           },
       .injections = {zeros_negated(FaultPoint::kForward), zeros_negated(FaultPoint::kBackward)}});
  faults.push_back(
      {.id = "signed_zero_key_bias",
       .subjects = {"ddp", "autotp"},
       .summary =
           "The gradient of GPT-2's key bias, 0 in exact arithmetic, holds rounding noise of the "
           "other sign.",
       .smallest_case = [] { return fault_case("gpt2", "autotp", {.dp = 3, .tp = 2}); },
       .injections = {key_biases_negated(
           {.point = FaultPoint::kCollective, .called = {{}, Purpose::kGradReduce, Axis::kDp}})}});
  faults.push_back(padding_content());
  faults.push_back(loss_in_runs(
      "loss_chunks", "The loss of a split vocabulary is computed in 4 chunks of the sequence.", 4,
      [] {
        Case item = fault_case("llama", "autotp", {.dp = 2, .tp = 3});
        item.settings.make_vocab_size_divisible_by = 1;
        return item;
      }));
  faults.push_back(loss_in_runs(
      "loss_chunks_7",
      "The loss is computed in 7 chunks of unequal length, some without a counted token.", 7, [] {
        Case item = fault_case("qwen2", "ddp", {.dp = 3});
        item.data.unequal_labels = true;
        return item;
      }));
  faults.push_back(loss_in_runs(
      "loss_chunks_bf16",
      "The loss of logits in bf16, with an fp32 softmax, is computed in 4 chunks.", 4, [] {
        Case item = fault_case("qwen2", "autotp", {.dp = 3, .tp = 2});
        item.dtype = Dtype::kBFloat16;
        return item;
      }));
  faults.push_back(loss_chunks_divided_late());
  faults.push_back(fused_rounding());
  faults.push_back(
      {.id = "adam_sign",
       .subjects = {"ddp", "autotp"},
       .summary =
           "First step of Adam where the gradient is rounding noise: the weight steps to the other "
           "side.",
       .smallest_case =
           [] {
             Case item = fault_case("gpt2", "autotp", {.dp = 3, .tp = 2});
             item.settings.optimizer = OptimizerSettings{};
             // below the noise: a step has the whole learning rate
             item.settings.optimizer.eps = 1e-15;
             return item;
           },
       .injections = {key_biases_negated({.point = FaultPoint::kUpdate})}});
  faults.push_back(clip_form());
  faults.push_back(clip_form_norm_of_norms());
}

}  // namespace isoshard
