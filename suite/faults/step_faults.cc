// SPDX-License-Identifier: Apache-2.0
/// Class G: tied weights; J: gradient accumulation; K: precision, what the optimizer steps; L: the
/// buffer that gradients and gathered parameters share.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

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
  fault.smallest_case = [] { return tied(fault_case("qwen2", "ddp", {.dp = 3})); };
  fault.hooks.parts = give_head_its_own_copy;
  fault.expected = expect(Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3),
                          {CauseId::kInputSideOnly});
  return fault;
}

Fault grads_zeroed_each_micro_batch() {
  Fault fault{.id = "grads_zeroed_each_micro_batch",
              .fault_class = 'J',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary = "Gradients were cleared at every micro-batch, not at every step.";
  fault.source = "torchtitan #3575";
  fault.smallest_case = [] { return of_four_micro_batches(fault_case("llama", "ddp", {.dp = 3})); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.schedule = schedule_double({.clears = [probe](const MicroBatchPlace& place) {
      if (place.index > 0) probe.fired();
      return true;
    }});
  };
  fault.expected =
      expect(Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3),
             {CauseId::kMicroBatchMissing, {{"present", std::vector{3}}, {"last", 3}}});
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
  fault.expected = expect(
      Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3),
      {CauseId::kMicroBatchRankLocal, {{"local", std::vector{3}}, {"last", 3}, {"axis", "dp"}}});
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
  fault.expected = expect(Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3),
                          {CauseId::kParameterValuesAdded, {{"factor", 1}}}, 1);
  return fault;
}

}  // namespace

void add_step_faults(Faults& faults) {
  faults.push_back(tie_lost());
  faults.push_back(grads_zeroed_each_micro_batch());
  faults.push_back(last_micro_batch_not_averaged());
  // Ranks of one replica compute together, and would fail in their first collective.
  faults.push_back(
      {.id = "autocast_on_some_ranks",
       .fault_class = 'K',
       .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"},
       .summary = "A cast was made on some ranks only: they held in bf16 what others held in fp32, "
                  "and each number was near its right value.",
       .source = "SkyRL #1709, PR 1725; pytorch #143181; DeepSpeed #4726",
       .smallest_case =
           [] {
             Case item = fault_case("llama", "ddp", {.dp = 3});
             item.settings.autocast = Dtype::kBFloat16;
             return item;
           },
       .injections = {{.point = FaultPoint::kSetting,
                       .name = "autocast",
                       .change = FaultChange::kSet,
                       .value = "none",
                       .ranks = FaultRanks{Axis::kDp, 1}}},
       .expected =
           expect(Stage::kForward, "model.layers.0.self_attn.q_proj", {1},
                  {CauseId::kMixedDtypes, {{"ranks", std::vector{1}}, {"usual", "bf16"}}})});
  faults.push_back(
      {.id = "optimizer_holds_old_params",
       .fault_class = 'K',
       .subjects = {"ddp", "autotp", "fsdp_tp"},
       .summary = "The optimizer was built on weights that existed before sharding; "
                  "the live ones were never updated.",
       .source = "accelerate #3209; pytorch #149205",
       .smallest_case = [] { return fault_case("llama", "ddp", {.dp = 3}); },
       .injections = {{.point = FaultPoint::kUpdate,
                       .layers = FaultLayers::kLast,
                       .change = FaultChange::kZero}},
       .expected = expect(Stage::kParameterAfterStep, "model.layers.1.self_attn.q_proj.weight",
                          any_rank(3), {CauseId::kNotUpdated})});
  faults.push_back(
      {.id = "bf16_master_weights",
       .fault_class = 'K',
       .subjects = {"autotp"},
       .summary = "Master weights were kept in bf16, so small updates were lost.",
       .source = "ray_train_tensor_parallel f70bc8f",
       .smallest_case =
           [] {
             Case item = fault_case("qwen2", "autotp", {.dp = 3, .tp = 2});
             item.dtype = Dtype::kBFloat16;
             item.settings.zero_stage = 1;
             item.settings.master_dtype = Dtype::kFloat32;
             item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
             item.settings.optimizer.learning_rate = 1e-4;
             // clipped gradients are recorded as the optimizer gets them: they would
             // be bf16, too
             item.settings.max_grad_norm = 0;
             item.steps = 2;
             return item;
           },
       .injections = {{.point = FaultPoint::kSetting,
                       .name = "master_dtype",
                       .change = FaultChange::kSet,
                       .value = "bf16"}},
       .expected =
           expect(Stage::kOptimizerState, "model.embed_tokens.weight.master", any_rank(6),
                  {CauseId::kMastersInOtherDtype, {{"dtype", "bf16"}, {"declared", "fp32"}}})});
  faults.push_back(grad_buffer_keeps_gathered_params());
}

}  // namespace isoshard
