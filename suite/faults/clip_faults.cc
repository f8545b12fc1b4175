// SPDX-License-Identifier: Apache-2.0
/// Class C: clipping and the gradient norm; and class I: replicas that are clipped differently.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <vector>

#include "subjects/optim/clip.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"
#include "suite/record/make_subject.h"

namespace isoshard {
namespace {

Fault clip_reported_not_applied() {
  Fault fault{.id = "clip_reported_not_applied",
              .fault_class = 'C',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary =
      "The parameter list was an iterator: the norm used it up and the scaling loop saw nothing.";
  fault.source = "torchtitan #1258; AReaL PR 335";
  fault.smallest_case = [] { return clipped(fault_case("qwen2", "ddp", {.dp = 3})); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    // the scaling that follows is undone beforehand
    parts.grad_norm = grad_norm_double(
        std::move(parts.grad_norm),
        [probe, max_norm = parts.max_grad_norm](GradNorm& inner, const NamedTensors& gradients) {
          const double norm = inner.norm(gradients);
          const double factor = clip_factor(norm, max_norm);
          if (factor < 1) {
            NamedTensors same = gradients;  // of the same memory
            scale_gradients(same, 1 / factor);
            probe.fired();
          }
          return norm;
        });
  };
  fault.expected = {Stage::kClippedGrad,
                    "model.embed_tokens.weight.clipped",
                    any_rank(3),
                    {CauseId::kClippingNotApplied}};
  return fault;
}

Fault clip_norm_rank0_only() {
  Fault fault{.id = "clip_norm_rank0_only", .fault_class = 'C', .subjects = {"autotp"}};
  fault.summary =
      "Flat groups mixed split and replicated gradients; all passed for replicated, so only tp "
      "rank 0 entered the norm.";
  fault.source = "DeepSpeed #5411";
  fault.smallest_case = [] { return clipped(fault_case("qwen2", "autotp", {.dp = 2, .tp = 3})); };
  fault.hooks.collective = [](const Case&) {
    SegmentChange change;
    change.matches = [](const CallInfo& info, const Segment*) {
      return info.purpose == Purpose::kClipNorm && info.axis == Axis::kTp;
    };
    change.before = [](const InterceptedCall& call, Buffer part) {
      if (call.comm->rank() != 0) tensor_of(part).zero_();
    };
    return change_segments(std::move(change));
  };
  fault.expected = {Stage::kGradNorm,
                    "grad_norm",
                    any_rank(6),
                    {CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 0}}}};
  return fault;
}

Fault clip_norm_of_own_shard() {
  Fault fault{
      .id = "clip_norm_of_own_shard", .fault_class = 'C', .subjects = {"autotp", "fsdp_tp"}};
  fault.summary = "Plain clipping of sharded weights used the norm of each rank's own shard.";
  fault.source = "pytorch #170862, #72548";
  fault.smallest_case = [] { return clipped(fault_case("llama", "fsdp_tp", {.dp = 3, .tp = 2})); };
  // Of autotp, whose gradients ZeRO 0 leaves whole on every dp rank, shards are those over tp.
  fault.hooks.collective = [](const Case& item) {
    const bool is_stepped_in_runs =
        declares_numerics(item) && !numerics_of(item).data.sharding.stepped_runs.empty();
    const Axis axis = is_stepped_in_runs ? Axis::kDp : Axis::kTp;
    return skip_segments([axis](const CallInfo& info, const Segment*) {
      return info.purpose == Purpose::kClipNorm && info.axis == axis;
    });
  };
  fault.expected = {
      Stage::kGradNorm, "grad_norm", any_rank(6), {CauseId::kSquaresNotSummed, {{"axis", "dp"}}}};
  return fault;
}

Fault replicated_counted_tp_times() {
  Fault fault{.id = "replicated_counted_tp_times",
              .fault_class = 'C',
              .subjects = {"autotp", "fsdp_tp", "megatron"}};
  fault.summary = "Weights that every tp rank holds whole entered the squared norm once per rank.";
  fault.source = "ROCm TransformerEngine PR 715; NeMo-RL #3788";
  fault.smallest_case = [] { return clipped(fault_case("qwen3", "autotp", {.dp = 2, .tp = 3})); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    const auto norm = [specs = parts.model->parameters(), plan = parts.plan,
                       data_parallel = parts.data_parallel.get(), &mesh,
                       probe](GradNorm& inner, const NamedTensors& gradients) {
      std::vector<ParameterSpec> replicated;
      std::copy_if(specs.begin(), specs.end(), std::back_inserter(replicated),
                   [&](const ParameterSpec& spec) { return plan.sharded_dim(spec) < 0; });
      Communicator* dp = data_parallel->is_cut_over_dp() ? &mesh.group(Axis::kDp) : nullptr;
      const double whole =
          GlobalGradNorm(replicated, plan, mesh.group(Axis::kTp), dp).norm(gradients);
      const int tp = mesh.degree(Axis::kTp);
      if (tp > 1 && whole > 0) probe.fired();
      const double right = inner.norm(gradients);
      return std::sqrt(right * right + (tp - 1) * whole * whole);
    };
    parts.grad_norm = grad_norm_double(std::move(parts.grad_norm), norm);
  };
  fault.expected = {Stage::kGradNorm,
                    "grad_norm",
                    any_rank(6),
                    {CauseId::kReplicatedCountedOften, {{"degree", 3}, {"axis", "tp"}}}};
  return fault;
}

bool is_small_and_replicated(ParamClass param_class) {
  return param_class == ParamClass::kNorm || param_class == ParamClass::kQkNorm ||
         param_class == ParamClass::kRowBias;
}

/// Steps by clipped gradients but for the small replicated weights, which are scaled on tp rank 0
/// only.
void clip_replicas_on_tp_rank_0(TrainerParts& parts, Mesh& mesh, const Case&,
                                const FaultProbe& probe) {
  const auto factor = std::make_shared<double>(1);
  parts.grad_norm = grad_norm_double(
      std::move(parts.grad_norm),
      [factor, max_norm = parts.max_grad_norm](GradNorm& inner, const NamedTensors& gradients) {
        const double norm = inner.norm(gradients);
        *factor = clip_factor(norm, max_norm);
        return norm;
      });
  const auto step = [factor, specs = parts.model->parameters(),
                     on_rank_0 = mesh.coordinate(Axis::kTp) == 0, probe](
                        Optimizer& inner, NamedTensors& parameters, const NamedTensors& gradients) {
    NamedTensors scaled;
    NamedTensors left_alone;  // what the step starts from
    for (const ParameterSpec& spec : specs) {
      const bool left_out = is_small_and_replicated(spec.param_class) && !on_rank_0 && *factor < 1;
      if (left_out) left_alone[spec.name] = parameters.at(spec.name).detach().clone();
      // gradients are clipped, and recorded so, before they come here
      scaled[spec.name] = left_out ? gradients.at(spec.name) / *factor : gradients.at(spec.name);
    }
    inner.step(parameters, scaled);
    // A step that rounds away altogether is not a different step.
    for (const auto& [name, before] : left_alone) {
      if (!inner.state().empty() || !at::equal(before, parameters.at(name))) probe.fired();
    }
  };
  parts.optimizer = optimizer_double(std::move(parts.optimizer), step);
}

Fault clip_applied_on_tp_rank0_only() {
  Fault fault{.id = "clip_applied_on_tp_rank0_only",
              .fault_class = 'I',
              .subjects = {"autotp", "megatron"}};
  fault.summary =
      "tp copies of norm weights drifted apart for days; clipping had not treated the copies "
      "alike.";
  fault.source = "Megatron-DeepSpeed PR 274; TrainCheck corpus";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "autotp", {.dp = 3, .tp = 2});
    item.steps = 3;
    return clipped(std::move(item));
  };
  fault.hooks.parts = clip_replicas_on_tp_rank_0;
  fault.expected = {Stage::kReplicaDrift,
                    "model.layers.0.input_layernorm.weight",
                    any_rank(6),
                    {CauseId::kNone, {{"axes", "tp"}}}};
  return fault;
}

}  // namespace

void add_clip_faults(Faults& faults) {
  for (Fault (*make)() :
       {clip_applied_on_tp_rank0_only, clip_norm_of_own_shard, clip_norm_rank0_only,
        clip_reported_not_applied, replicated_counted_tp_times}) {
    faults.push_back(make());
  }
}

}  // namespace isoshard
