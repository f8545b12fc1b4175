// SPDX-License-Identifier: Apache-2.0
/// Faults of ZeRO: master weights, the buffers that gradients and gathered parameters share.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>

#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Fault bf16_master_weights() {
  Fault fault{.id = "bf16_master_weights", .fault_class = 'K', .subjects = {"autotp"}};
  fault.summary = "Master weights were kept in bf16, so small updates were lost.";
  fault.source = "ray_train_tensor_parallel f70bc8f";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "autotp", {.dp = 3, .tp = 2});
    item.dtype = Dtype::kBFloat16;
    item.settings.zero_stage = 1;
    item.settings.master_dtype = Dtype::kFloat32;
    item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
    item.settings.optimizer.learning_rate = 1e-4;
    // clipped gradients are recorded as the optimizer gets them: they would be bf16, too
    item.settings.max_grad_norm = 0;
    item.steps = 2;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    if (!parts.master_dtype.has_value() || *parts.master_dtype == Dtype::kBFloat16) return;
    parts.master_dtype = Dtype::kBFloat16;
    probe.fired();
  };
  fault.expected = {Stage::kOptimizerState,
                    "model.embed_tokens.weight.master",
                    any_rank(6),
                    {CauseId::kMastersInOtherDtype, {{"dtype", "bf16"}, {"declared", "fp32"}}}};
  return fault;
}

// What a shared buffer would hold: the parameters that were gathered into it.
Fault grad_buffer_keeps_gathered_params() {
  Fault fault{
      .id = "grad_buffer_keeps_gathered_params", .fault_class = 'L', .subjects = {"ddp", "autotp"}};
  fault.summary =
      "The gradient buffer doubled as receive buffer of the weight gather and was not cleared "
      "afterwards.";
  fault.source = "Megatron-LM #4609";
  fault.smallest_case = [] {
    Case item = fault_case("llama", "autotp", {.dp = 3});
    item.settings.zero_stage = 1;
    item.steps = 2;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.data_parallel = data_parallel_double(
        std::move(parts.data_parallel), {.clear_gradients = [probe](DataParallel& inner, int step) {
          inner.clear_gradients();
          if (step == 0) return;
          const at::NoGradGuard no_grad;
          for (const auto& [name, parameter] : inner.held())
            parameter.mutable_grad() = parameter.detach().clone();
          probe.fired();
        }});
  };
  fault.expected = {Stage::kParameterGrad,
                    "model.embed_tokens.weight",
                    any_rank(3),
                    {CauseId::kParameterValuesAdded, {{"factor", 1}}},
                    1};
  return fault;
}

}  // namespace

void add_zero_faults(Faults& faults) {
  for (Fault (*make)() : {bf16_master_weights, grad_buffer_keeps_gathered_params})
    faults.push_back(make());
}

}  // namespace isoshard
