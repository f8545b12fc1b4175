// SPDX-License-Identifier: Apache-2.0
/// Class B: divisors and factors that are wrong.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Fault averaged_over_tp_too() {
  Fault fault{.id = "averaged_over_tp_too", .fault_class = 'B', .subjects = {"autotp"}};
  fault.summary =
      "Not told about tp, the library took all ranks for data replicas and averaged gradients of "
      "different shards.";
  fault.source = "ray_train_tensor_parallel b5df13a";
  fault.smallest_case = [] { return fault_case("qwen2", "autotp", {.dp = 2, .tp = 3}); };
  fault.hooks.collective = [](const Case&) {
    SegmentChange change;
    change.matches = [](const CallInfo& info, const Segment* segment) {
      return is_gradient_of(info, segment, Axis::kDp, ParamClass::kMatrix);
    };
    change.after = [](const InterceptedCall& call, ConstBuffer input, Buffer result) {
      std::copy_n(input.data, static_cast<std::size_t>(input.count) * size_of(input.dtype),
                  result.data);
      call.mesh->world()
          .all_reduce(result, Reduction::kAvg, {Purpose::kGradReduce, Axis::kWorld, {}})
          .wait();
    };
    return change_segments(std::move(change));
  };
  fault.expected = expect(Stage::kParameterGrad, "model.layers.0.self_attn.q_proj.weight",
                          any_rank(6), {CauseId::kMeanOfShards, {{"shards", 3}}});
  return fault;
}

Fault mean_of_rank_means() {
  Fault fault{
      .id = "mean_of_rank_means", .fault_class = 'B', .subjects = {"ddp", "autotp", "fsdp_tp"}};
  fault.summary =
      "Each rank averaged over its own valid tokens; tokens on ranks with few of them weighed too "
      "much.";
  fault.source = "torchtitan #2206; transformers #34191";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "ddp", {.dp = 3});
    item.data.unequal_labels = true;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.loss_normalizer = loss_normalizer_double(
        std::move(parts.loss_normalizer),
        [probe](LossNormalizer& inner, std::span<const std::int64_t> counts) {
          const std::vector<double> right = inner.weights(counts);
          std::vector<double> own = GroupTokenMean(1).weights(counts);
          // Ranks with equally many tokens, or that should each take their own mean, weigh alike up
          // to rounding.
          if (!std::equal(
                  right.begin(), right.end(), own.begin(), own.end(),
                  [](double a, double b) { return std::fabs(a - b) <= 1e-12 * std::fabs(a); }))
            probe.fired();
          return own;
        });
  };
  fault.expected = expect(
      Stage::kForward, "loss", any_rank(3),
      {CauseId::kMeanOfRankMeans, {{"means", 3}, {"token_counts", std::vector{44, 36, 28}}}});
  return fault;
}

/// Divides what earlier micro-batches have added up again before each of the next ones.
void fade_accumulated(TrainerParts& parts, int micro_batches, const FaultProbe& probe) {
  parts.model = accumulation_double(
      parts.model, micro_batches, [micro_batches, probe](const Parameters& parameters, int) {
        for (const auto& [name, parameter] : parameters) {
          if (!parameter.grad().defined()) continue;
          const at::Tensor whole = parameter.grad().clone();
          (void)counted(probe, whole, parameter.mutable_grad().div_(micro_batches));
        }
      });
}

/// Where every micro-batch is reduced into a running sum of pieces (ZeRO 2), a piece fades by a
/// factor that its micro-batch decides.
Fault scaled_at_each_accumulation() {
  Fault fault{
      .id = "scaled_at_each_accumulation", .fault_class = 'B', .subjects = {"ddp", "autotp"}};
  fault.summary =
      "The running gradient was divided again after every micro-batch, a fading average instead of "
      "a sum.";
  fault.source = "torchtitan #1732";
  fault.smallest_case = [] {
    return of_four_micro_batches(fault_case("llama", "autotp", {.dp = 3, .tp = 2}));
  };
  // The losses are divided by the number of micro-batches already, so the last one is right.
  const auto place = std::make_shared<MicroBatchPlace>();
  fault.hooks.parts = [place](TrainerParts& parts, Mesh&, const Case& item,
                              const FaultProbe& probe) {
    if (reduces_every_micro_batch(item)) {
      parts.schedule = place_watcher(place);
    } else {
      fade_accumulated(parts, item.micro_batches, probe);
    }
  };
  fault.hooks.collective = [place](const Case& item) {
    SegmentChange change;
    change.matches = [is_here = reduces_every_micro_batch(item)](const CallInfo& info,
                                                                 const Segment*) {
      return is_here && info.purpose == Purpose::kGradReduce && info.axis == Axis::kDp;
    };
    change.of_own_blocks = true;
    change.after = [place](const InterceptedCall&, ConstBuffer, Buffer result) {
      const int divisions = place->count - 1 - place->index;
      if (divisions > 0) tensor_of(result).mul_(std::pow(place->count, -divisions));
    };
    return change_segments(std::move(change));
  };
  fault.expected = expect(
      Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(6),
      {CauseId::kMicroBatchWeights,
       {{"weights", std::vector{0.00390625, 0.015625, 0.0625, 0.25}}, {"micro_batches", 4}}});
  return fault;
}

/// The optimizer of a library that always divides by its loss scale, and never clears gradients.
void divide_by_loss_scale(TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
  constexpr double kLossScale = 65536;
  parts.grad_norm = grad_norm_double(std::move(parts.grad_norm),
                                     [probe](GradNorm& inner, const NamedTensors& gradients) {
                                       const double norm = inner.norm(gradients);
                                       if (norm != 0) probe.fired();
                                       return norm / kLossScale;
                                     });
  parts.optimizer = optimizer_double(
      std::move(parts.optimizer),
      [](Optimizer& inner, NamedTensors& parameters, const NamedTensors& gradients) {
        NamedTensors divided;
        for (const auto& [name, gradient] : gradients) divided[name] = gradient / kLossScale;
        inner.step(parameters, divided);
      });
  parts.schedule = schedule_double(
      {.clears = [](const MicroBatchPlace& place) { return place.step == 0 && place.index == 0; }});
}

Fault divided_by_unused_loss_scale() {
  Fault fault{
      .id = "divided_by_unused_loss_scale", .fault_class = 'B', .subjects = {"ddp", "autotp"}};
  fault.summary =
      "The optimizer divided by an fp16 loss scale that backward had never applied, and old "
      "gradients were kept.";
  fault.source = "DeepSpeed #7837, #7839";
  fault.smallest_case = [] {
    // In fp32, where an update of 2^-16 of the right one is still seen.
    Case item = fault_case("qwen2", "autotp", {.dp = 3});
    item.steps = 2;
    item.settings.max_grad_norm = 0;
    return item;
  };
  fault.hooks.parts = divide_by_loss_scale;
  fault.expected = expect(Stage::kGradNorm, "grad_norm", any_rank(3),
                          {CauseId::kScaleOfFormula, {{"scale", 0x1p-16}, {"formula", "2^-16"}}});
  return fault;
}

}  // namespace

void add_scale_faults(Faults& faults) {
  faults.push_back(averaged_over_tp_too());
  faults.push_back(divided_by_unused_loss_scale());
  faults.push_back(
      {.id = "loss_divided_twice",
       .fault_class = 'B',
       .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"},
       .summary = "Trainer and engine both divided the loss by the number of micro-batches before "
                  "backward; the reported loss was divided once.",
       .source = "transformers PR 35808; accelerate #3533",
       .smallest_case = [] { return of_four_micro_batches(fault_case("llama", "ddp", {.dp = 3})); },
       .injections = {{.point = FaultPoint::kLoss,
                       .change = FaultChange::kScale,
                       .factor = FaultFactor::kOneOverMicroBatches}},
       .expected =
           expect(Stage::kForward, "loss_backward", any_rank(3),
                  {CauseId::kScaleOfFormula, {{"scale", 0.25}, {"formula", "1/micro-batches"}}})});
  faults.push_back(mean_of_rank_means());
  faults.push_back(
      {.id = "micro_batch_average_missing",
       .fault_class = 'B',
       .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"},
       .summary = "A loss term was added up over micro-batches and never averaged.",
       .source = "Megatron-LM #4070, adfa873d96",
       .smallest_case =
           [] { return of_four_micro_batches(fault_case("llama", "autotp", {.dp = 3, .tp = 2})); },
       .injections = {scaled(Purpose::kGradReduce, Axis::kDp, FaultFactor::kMicroBatches)},
       .expected =
           expect(Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(6),
                  {CauseId::kScaleOfFormula, {{"scale", 4}, {"formula", "micro-batches"}}})});
  faults.push_back(
      {.id = "norm_grad_averaged_over_tp",
       .fault_class = 'B',
       .subjects = {"autotp", "megatron"},
       .summary = "One class of weights was averaged over tp where its parts had to be summed, or "
                  "took the divisor of another class.",
       .source = "gpt-neox PR 1259; Megatron-LM 4f8974a400",
       .smallest_case = [] { return sequence_case("llama", {.dp = 2, .tp = 3}); },
       .injections = {scaled(Purpose::kGradReduce, Axis::kTp, FaultFactor::kOneOverTp,
                             {ParamClass::kNorm, ParamClass::kQkNorm})},
       .expected =
           expect(Stage::kParameterGrad, "model.layers.0.input_layernorm.weight", any_rank(6),
                  {CauseId::kScaleOfFormula, {{"scale", 0.3333}, {"formula", "1/tp"}}})});
  faults.push_back(scaled_at_each_accumulation());
  Injection doubled =
      scaled(Purpose::kGradReduce, Axis::kDp, FaultFactor::kMagnitude, {ParamClass::kTied});
  doubled.magnitude = 1;
  faults.push_back(
      {.id = "tied_grad_doubled",
       .fault_class = 'B',
       .subjects = {"ddp", "autotp", "fsdp_tp"},
       .summary = "A tied weight stood in the list under both names and its full gradient was "
                  "written back twice.",
       .source = "torchtitan #3174",
       .smallest_case = [] { return tied(fault_case("qwen2", "ddp", {.dp = 3})); },
       .injections = {std::move(doubled)},
       .expected =
           expect(Stage::kParameterGrad, "model.embed_tokens.weight", any_rank(3),
                  {CauseId::kScaleOfFormula, {{"scale", 2}, {"formula", "number of names"}}})});
}

}  // namespace isoshard
