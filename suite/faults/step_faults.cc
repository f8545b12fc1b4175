// SPDX-License-Identifier: Apache-2.0
/// Class G: tied weights; J: gradient accumulation; K: precision, what the optimizer steps.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

/// The head's products are made with a copy of the embedding, made when the model first runs.
void give_head_its_own_copy(TrainerParts& parts, Mesh&, const Case& item, const FaultProbe& probe) {
  if (!item.config.tie_word_embeddings) return;
  std::set<std::string, std::less<>> weights;
  for (const ParameterSpec& spec : parts.model->parameters()) weights.insert(spec.name);
  const auto head = std::make_shared<at::Tensor>();
  const auto linear = [=](const Strategy& inner, std::string_view module, const at::Tensor& x,
                          const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          Sink* sink) {
    if (weights.contains(fmt::format("{}.weight", module)))
      return inner.linear(module, x, weight, bias, sink);
    // of a module without a weight of its own
    if (!head->defined()) *head = weight.detach().clone();
    probe.fired();
    return inner.linear(module, x, *head, bias, sink);
  };
  parts.strategy = strategy_double(parts.strategy, {.linear = linear});
}

Fault tie_lost() {
  Fault fault{.id = "tie_lost", .fault_class = 'G', .subjects = {"ddp", "autotp", "fsdp_tp"}};
  fault.summary =
      "Sharding (or overlap) gave the head its own copy; embedding and head trained apart without "
      "notice.";
  fault.source = "Megatron-LM #656; lingua PR 75; verl #7834";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "ddp", {.dp = 3});
    item.config.tie_word_embeddings = true;
    item.model_name += "_tied";
    return item;
  };
  fault.hooks.parts = give_head_its_own_copy;
  fault.expected = {
      Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3), {CauseId::kInputSideOnly}};
  return fault;
}

Case llama_of_four_micro_batches() {
  Case item = fault_case("llama", "ddp", {.dp = 3});
  item.micro_batches = 4;
  return item;
}

Fault grads_zeroed_each_micro_batch() {
  Fault fault{.id = "grads_zeroed_each_micro_batch",
              .fault_class = 'J',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary = "Gradients were cleared at every micro-batch, not at every step.";
  fault.source = "torchtitan #3575";
  fault.smallest_case = llama_of_four_micro_batches;
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.schedule = schedule_double({.clears = [probe](const MicroBatchPlace& place) {
      if (place.index > 0) probe.fired();
      return true;
    }});
  };
  fault.expected = {Stage::kParameterGrad,
                    "model.embed_tokens.weight",
                    any_rank(3),
                    {CauseId::kMicroBatchMissing, {{"present", std::vector{3}}, {"last", 3}}}};
  return fault;
}

Fault last_micro_batch_not_averaged() {
  Fault fault{
      .id = "last_micro_batch_not_averaged", .fault_class = 'J', .subjects = {"ddp", "autotp"}};
  fault.summary =
      "The last micro-batch was added after the reduction; each rank kept its own part of it.";
  fault.source = "DeepSpeed #7985";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "autotp", {.dp = 3});
    item.settings.zero_stage = 1;
    item.micro_batches = 4;
    return item;
  };
  // Where every micro-batch is reduced (ZeRO 2), the last one is left out; elsewhere the one
  // reduction comes too early.
  const auto place = std::make_shared<MicroBatchPlace>();
  fault.hooks.parts = [place](TrainerParts& parts, Mesh&, const Case& item,
                              const FaultProbe& probe) {
    if (item.degrees.dp == 1) return;
    if (reduces_every_micro_batch(item)) {
      parts.schedule = place_watcher(place);
      return;
    }
    parts.schedule = schedule_double({.reduces = [probe](const MicroBatchPlace& current) {
      const bool next_to_last = current.index + 2 == current.count;
      if (next_to_last) probe.fired();
      return next_to_last || current.count == 1;
    }});
  };
  fault.hooks.collective = [place](const Case& item) {
    return skip_segments(
        [place, is_here = reduces_every_micro_batch(item)](const CallInfo& info, const Segment*) {
          return is_here && place->count > 1 && place->is_last() &&
                 info.purpose == Purpose::kGradReduce && info.axis == Axis::kDp;
        });
  };
  fault.expected = {
      Stage::kParameterGrad,
      "model.embed_tokens.weight",
      any_rank(3),
      {CauseId::kMicroBatchRankLocal, {{"local", std::vector{3}}, {"last", 3}, {"axis", "dp"}}}};
  return fault;
}

Fault optimizer_holds_old_params() {
  Fault fault{.id = "optimizer_holds_old_params",
              .fault_class = 'K',
              .subjects = {"ddp", "autotp", "fsdp_tp"}};
  fault.summary =
      "The optimizer was built on weights that existed before sharding; the live ones were never "
      "updated.";
  fault.source = "accelerate #3209; pytorch #149205";
  fault.smallest_case = [] { return fault_case("llama", "ddp", {.dp = 3}); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case& item, const FaultProbe& probe) {
    const auto old = std::make_shared<NamedTensors>();
    parts.optimizer = optimizer_double(
        std::move(parts.optimizer), [old, probe, item](Optimizer& inner, NamedTensors& parameters,
                                                       const NamedTensors& gradients) {
          NamedTensors stepped = parameters;
          for (auto& [name, parameter] : stepped) {
            if (!is_in_last_layer(item, name)) continue;
            at::Tensor& copy = (*old)[name];
            if (!copy.defined()) copy = parameter.detach().clone();
            parameter = copy;
          }
          inner.step(stepped, gradients);
          for (const auto& [name, copy] : *old) (void)counted(probe, parameters.at(name), copy);
        });
  };
  fault.expected = {Stage::kParameterAfterStep,
                    "model.layers.1.self_attn.q_proj.weight",
                    any_rank(3),
                    {CauseId::kNotUpdated}};
  return fault;
}

Fault autocast_on_some_ranks() {
  Fault fault{.id = "autocast_on_some_ranks",
              .fault_class = 'K',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary =
      "A cast was made on some ranks only: they held in bf16 what others held in fp32, and each "
      "number was near its right value.";
  fault.source = "SkyRL #1709, PR 1725; pytorch #143181; DeepSpeed #4726";
  fault.smallest_case = [] {
    Case item = fault_case("llama", "ddp", {.dp = 3});
    item.settings.autocast = Dtype::kBFloat16;
    return item;
  };
  // Ranks of one replica compute together, and would fail in their first collective.
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    if (!parts.autocast.has_value() || mesh.coordinate(Axis::kDp) != 1) return;
    parts.autocast.reset();
    probe.fired();
  };
  fault.expected = {Stage::kForward,
                    "model.layers.0.self_attn.q_proj",
                    {1},
                    {CauseId::kMixedDtypes, {{"ranks", std::vector{1}}, {"usual", "bf16"}}}};
  return fault;
}

}  // namespace

void add_step_faults(Faults& faults) {
  for (Fault (*make)() : {tie_lost, grads_zeroed_each_micro_batch, last_micro_batch_not_averaged,
                          autocast_on_some_ranks, optimizer_holds_old_params}) {
    faults.push_back(make());
  }
}

}  // namespace isoshard
