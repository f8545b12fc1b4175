// SPDX-License-Identifier: Apache-2.0
/// Class G: tied weights; J: gradient accumulation; K: what the optimizer steps.
#include <ATen/ATen.h>

#include <memory>

#include "conformance/detection/catalogue.h"
#include "conformance/detection/twins.h"

namespace isoshard {
namespace {

/// Forward of the same model untied, whose head is a copy of the embedding made when the model first runs.
void give_head_its_own_copy(TrainerParts& parts, Mesh&, const Case& item, const FaultProbe& probe) {
  ModelConfig config = item.config;
  if (!config.tie_word_embeddings) return;
  config.tie_word_embeddings = false;
  const std::shared_ptr<const Model> untied = make_model(config, item.attention);
  std::string tied_name;
  for (const ParameterSpec& spec : parts.model->parameters()) {
    if (spec.param_class == ParamClass::kTied) tied_name = spec.name;
  }
  const auto head = std::make_shared<at::Tensor>();
  const auto with_head = std::make_shared<Parameters>();  // a recomputed layer reads it again in backward
  parts.model = model_twin(parts.model, [=](const at::Tensor& ids_BS, const Parameters& parameters, const Strategy& strategy, Sink* sink,
                                            const TrainingPass& training) {
    if (!head->defined()) *head = parameters.at(tied_name).detach().clone();
    probe.fired();
    *with_head = parameters;
    (*with_head)["lm_head.weight"] = *head;
    return untied->forward(ids_BS, *with_head, strategy, sink, training);
  });
}

Fault tie_lost() {
  Fault fault{.id = "tie_lost", .fault_class = 'G', .subjects = {"ddp", "autotp"}};
  fault.summary = "Sharding (or overlap) gave the head its own copy; embedding and head trained apart without notice.";
  fault.source = "Megatron-LM #656; lingua PR 75; verl #7834";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "ddp", 1, 3);
    item.config.tie_word_embeddings = true;
    item.model_name += "_tied";
    return item;
  };
  fault.hooks.parts = give_head_its_own_copy;
  fault.expected = {Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3), "only the input side is present"};
  return fault;
}

Case llama_of_four_micro_batches() {
  Case item = fault_case("llama", "ddp", 1, 3);
  item.micro_batches = 4;
  return item;
}

Fault grads_zeroed_each_micro_batch() {
  Fault fault{.id = "grads_zeroed_each_micro_batch", .fault_class = 'J', .subjects = {"ddp", "autotp"}};
  fault.summary = "Gradients were cleared at every micro-batch, not at every step.";
  fault.source = "torchtitan #3575";
  fault.smallest_case = llama_of_four_micro_batches;
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.schedule = schedule_twin({.clears = [probe](const MicroBatchPlace& place) {
      if (place.index > 0) probe.fired();
      return true;
    }});
  };
  fault.expected = {Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3), "only micro-batch 3 of 0..3 is present"};
  return fault;
}

Fault last_micro_batch_not_averaged() {
  Fault fault{.id = "last_micro_batch_not_averaged", .fault_class = 'J', .subjects = {"ddp", "autotp"}};
  fault.summary = "The last micro-batch was added after the reduction; each rank kept its own part of it.";
  fault.source = "DeepSpeed #7985";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "autotp", 1, 3);
    item.settings.zero_stage = 1;
    item.micro_batches = 4;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.schedule = schedule_twin({.reduces = [probe](const MicroBatchPlace& place) {
      const bool next_to_last = place.index + 2 == place.count;
      if (next_to_last) probe.fired();
      return next_to_last || place.count == 1;
    }});
  };
  fault.expected = {Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3), "micro-batch 3 of 0..3 is rank-local over dp"};
  return fault;
}

Fault optimizer_holds_old_params() {
  Fault fault{.id = "optimizer_holds_old_params", .fault_class = 'K', .subjects = {"ddp", "autotp"}};
  fault.summary = "The optimizer was built on weights that existed before sharding; the live ones were never updated.";
  fault.source = "accelerate #3209; pytorch #149205";
  fault.smallest_case = [] { return fault_case("llama", "ddp", 1, 3); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case& item, const FaultProbe& probe) {
    const auto old = std::make_shared<NamedTensors>();
    parts.optimizer = optimizer_twin(std::move(parts.optimizer),
                                     [old, probe, item](Optimizer& inner, NamedTensors& parameters, const NamedTensors& gradients) {
                                       NamedTensors stepped = parameters;
                                       for (auto& [name, parameter] : stepped) {
                                         if (!is_in_last_layer(item, name)) continue;
                                         at::Tensor& copy = (*old)[name];
                                         if (!copy.defined()) copy = parameter.detach().clone();
                                         parameter = copy;
                                         probe.fired();
                                       }
                                       inner.step(stepped, gradients);
                                     });
  };
  fault.expected = {Stage::kParameterAfterStep, "model.layers.1.self_attn.q_proj.weight", any_rank(3), "not updated (bitwise as before)"};
  return fault;
}

}  // namespace

void add_step_faults(Faults& faults) {
  for (Fault (*make)() : {tie_lost, grads_zeroed_each_micro_batch, last_micro_batch_not_averaged, optimizer_holds_old_params}) {
    faults.push_back(make());
  }
}

}  // namespace isoshard
