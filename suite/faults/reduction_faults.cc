// SPDX-License-Identifier: Apache-2.0
/// Class A: reductions that are missing or happen once too often.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/registry/subject_spec.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

/// Every average over dp is taken once more. Equal copies have themselves as their mean: nothing
/// but the list of calls shows it.
class SecondAverage final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllReduce && call.reduction == Reduction::kAvg &&
           call.info.purpose == Purpose::kGradReduce && call.info.axis == Axis::kDp &&
           call.comm->size() > 1;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    call.pass().wait();
    return call.pass();
  }
};

Fault gradients_averaged_twice() {
  Fault fault{.id = "gradients_averaged_twice", .fault_class = 'A', .subjects = {"ddp"}};
  fault.summary =
      "The wrapper averaged gradients and the training loop averaged them again; every number was "
      "right and the network carried twice as much.";
  fault.source = "kubeflow/pytorch-operator #122";
  fault.smallest_case = [] { return fault_case("qwen2", "ddp", {.dp = 3}); };
  fault.hooks.collective = [](const Case&) { return std::make_shared<SecondAverage>(); };
  fault.expected = expect(Stage::kCollectives, "collectives.dp.rank0", {0},
                          {CauseId::kCallMadeAgain, {{"call", 3}}});
  return fault;
}

/// Matrices in model order, with the number of elements that a rank of ddp or autotp holds.
std::vector<std::pair<std::string, std::int64_t>> matrices_of_a_rank(const Case& item) {
  const auto model = make_model(item.config, item.attention);
  const ShardPlan plan =
      subject_spec(item.subject).has(Axis::kTp)
          ? autotp_plan(*model, item.degrees.tp, item.settings.make_vocab_size_divisible_by)
          : ShardPlan{};
  std::vector<std::pair<std::string, std::int64_t>> matrices;
  for (const ParameterSpec& spec : model->parameters()) {
    if (plan.class_of(spec) != ParamClass::kMatrix) continue;
    matrices.emplace_back(
        spec.name, numel_of(spec.shape) / (plan.sharded_dim(spec) < 0 ? 1 : item.degrees.tp));
  }
  return matrices;
}

/// The case's bucket, in elements, if a matrix is just as large; else the first matrix.
std::int64_t bucket_of_a_matrix(const Case& item) {
  const auto bucket = item.settings.bucket_bytes / static_cast<std::int64_t>(size_of(item.dtype));
  const auto matrices = matrices_of_a_rank(item);
  const bool fits = std::any_of(matrices.begin(), matrices.end(),
                                [&](const auto& matrix) { return matrix.second == bucket; });
  return fits || matrices.empty() ? bucket : matrices.front().second;
}

Fault bucket_sized_param_not_reduced() {
  Fault fault{
      .id = "bucket_sized_param_not_reduced", .fault_class = 'A', .subjects = {"ddp", "autotp"}};
  fault.summary =
      "A gradient exactly as large as the bucket took a side path that skipped the reduction.";
  fault.source = "DeepSpeed #4321, #3832";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "autotp", {.dp = 3});
    item.settings.zero_stage = 2;
    // q_proj.weight in fp32
    item.settings.bucket_bytes = item.config.hidden_size * item.config.hidden_size * 4;
    return item;
  };
  // The bucket is made to fit where nothing has its size.
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case& item, const FaultProbe&) {
    parts.bucket_bytes = bucket_of_a_matrix(item) * static_cast<std::int64_t>(size_of(item.dtype));
  };
  fault.hooks.collective = [](const Case& item) {
    std::set<std::string> as_large;
    for (const auto& [name, numel] : matrices_of_a_rank(item)) {
      if (numel == bucket_of_a_matrix(item)) as_large.insert(name);
    }
    return skip_segments([as_large](const CallInfo& info, const Segment* segment) {
      return is_gradient_of(info, segment, Axis::kDp, ParamClass::kMatrix) &&
             as_large.contains(segment->name);
    });
  };
  fault.expected = expect(Stage::kParameterGrad, "model.layers.0.self_attn.q_proj.weight",
                          any_rank(3), {CauseId::kPiecesRankLocal, {{"axis", "dp"}}});
  return fault;
}

/// The initial biases of each layer's first row-parallel module (attention's), by module.
std::map<std::string, at::Tensor> attention_row_biases(const Case& item) {
  std::map<std::string, at::Tensor> biases;
  const std::shared_ptr<const WeightSource> weights = case_weights(item);
  const std::set<std::string> first = first_row_biases(item);
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    if (!first.contains(spec.name)) continue;
    const std::string module = spec.name.substr(0, spec.name.rfind('.'));
    biases[module] =
        weights->read(spec, Shape(spec.shape.size(), 0), spec.shape).to(scalar_type_of(item.dtype));
  }
  return biases;
}

Fault row_bias_added_on_every_rank() {
  Fault fault{
      .id = "row_bias_added_on_every_rank", .fault_class = 'A', .subjects = {"autotp", "megatron"}};
  fault.summary = "Every tp rank added the full bias before the sum, so the bias counted tp times.";
  fault.source = "torchtitan #4245";
  fault.smallest_case = [] { return fault_case("gpt2", "autotp", {.dp = 2, .tp = 3}); };
  fault.hooks.collective = [](const Case& item) {
    SegmentChange change;
    const auto biases = attention_row_biases(item);
    change.matches = [biases](const CallInfo& info, const Segment* segment) {
      return info.purpose == Purpose::kRowParallelForward && segment != nullptr &&
             biases.contains(segment->name);
    };
    // Rank 0's share of the bias is the one that the layer itself adds after the sum.
    change.before = [biases](const InterceptedCall& call, Buffer part) {
      const at::Tensor& bias = biases.at(call.info.segments[0].name);
      if (call.comm->rank() != 0) tensor_of(part).view({-1, bias.numel()}).add_(bias);
    };
    return change_segments(std::move(change));
  };
  fault.expected = expect(Stage::kForward, "transformer.h.0.attn.c_proj", any_rank(6),
                          {CauseId::kParameterAddedTimes, {{"factor", 2}, {"axis", "tp"}}});
  return fault;
}

/// The sum over tp of the gradients of a class in these layers, skipped.
Injection no_tp_sum(ParamClass param_class, FaultLayers layers) {
  Injection injection = skipped(Purpose::kGradReduce, Axis::kTp, {param_class});
  injection.layers = layers;
  return injection;
}

void add_sequence_parallel_reductions(Faults& faults) {
  faults.push_back(
      {.id = "sp_final_norm_grad_partial",
       .fault_class = 'A',
       .subjects = {"megatron"},
       .summary = "Under sequence parallelism the last norm was not in the list of weights to sum "
                  "over tp; each rank kept its own part.",
       .source = "Megatron-LM #1446, PR 1528",
       .smallest_case = [] { return sequence_case("llama", {.dp = 2, .tp = 3}); },
       .injections = {no_tp_sum(ParamClass::kNorm, FaultLayers::kOutside)},
       .expected = expect(Stage::kParameterGrad, "model.norm.weight", any_rank(6),
                          {CauseId::kRankLocalPartial, {{"axis", "tp"}, {"copies", 3}}})});
  faults.push_back(
      {.id = "sp_layer_norm_grads_partial",
       .fault_class = 'A',
       .subjects = {"megatron"},
       .summary = "No layer norm gradient was summed over tp under sequence parallelism; the loss "
                  "curve went flat early.",
       .source = "gpt-neox PR 1257; InternEvo PR 53",
       .smallest_case = [] { return sequence_case("qwen2", {.dp = 3, .tp = 2}); },
       .injections = {no_tp_sum(ParamClass::kNorm, FaultLayers::kInside)},
       .expected = expect(Stage::kParameterGrad, "model.layers.0.input_layernorm.weight",
                          any_rank(6), {CauseId::kRankLocalPartial, {{"axis", "tp"}}})});
  faults.push_back(
      {.id = "sp_row_bias_grad_partial",
       .fault_class = 'A',
       .subjects = {"megatron"},
       .summary = "A small replicated weight fed with sequence shards was not marked as such (a "
                  "router in the thread); its tp copies trained apart.",
       .source = "Megatron-LM #599, PR 619",
       .smallest_case = [] { return sequence_case("gpt2", {.dp = 2, .tp = 3}); },
       .injections = {no_tp_sum(ParamClass::kRowBias, FaultLayers::kFirstOfEach)},
       .expected = expect(Stage::kParameterGrad, "transformer.h.0.attn.c_proj.bias", any_rank(6),
                          {CauseId::kRankLocalPartial, {{"axis", "tp"}}})});
}

}  // namespace

void add_reduction_faults(Faults& faults) {
  faults.push_back(bucket_sized_param_not_reduced());
  faults.push_back(
      {.id = "dp_sum_missing",
       .fault_class = 'A',
       .subjects = {"ddp", "autotp", "fsdp_tp"},
       .summary = "The data-parallel wrapper was never applied; every replica trained on its own "
                  "gradient.",
       .source = "ray_train_tensor_parallel verify_fsdp.py",
       .smallest_case = [] { return fault_case("qwen2", "ddp", {.dp = 3}); },
       .injections = {skipped(Purpose::kGradReduce, Axis::kDp)},
       .expected = expect(Stage::kParameterGrad, "", any_rank(3),
                          {CauseId::kRankLocal, {{"axis", "dp"}}})});
  faults.push_back(gradients_averaged_twice());
  faults.push_back(
      {.id = "kv_replica_grad_partial",
       .fault_class = 'A',
       .subjects = {"autotp", "megatron"},
       .summary = "A replicated weight sat between split regions; each tp rank had a partial "
                  "gradient and the copies parted at the first step.",
       .source = "torchtitan #2387, #2416",
       .smallest_case = copied_kv_heads_case,
       .injections = {skipped(Purpose::kGradReduce, Axis::kTp, {ParamClass::kKvReplica})},
       .expected =
           expect(Stage::kParameterGrad, "model.layers.0.self_attn.k_proj.weight", any_rank(4),
                  {CauseId::kRankLocalPartial, {{"axis", "tp"}, {"copies", 2}}})});
  Injection last_mlp = skipped(Purpose::kColumnParallelBackward, Axis::kTp);
  last_mlp.name = "*.mlp.*";
  last_mlp.layers = FaultLayers::kLast;
  faults.push_back(
      {.id = "mlp_input_grad_partial",
       .fault_class = 'A',
       .subjects = {"autotp", "fsdp_tp", "megatron"},
       .summary = "The input gradient of column-split weights stayed a partial sum on each rank; "
                  "forward right, everything upstream wrong.",
       .source = "torchtitan #1805, #1878",
       .smallest_case = [] { return fault_case("qwen2", "autotp", {.dp = 2, .tp = 3}); },
       .injections = {std::move(last_mlp)},
       .expected = expect(Stage::kActivationGrad, "model.layers.1.post_attention_layernorm",
                          any_rank(6), {CauseId::kRankLocalPartial, {{"axis", "tp"}}})});
  faults.push_back(
      {.id = "qk_norm_grad_partial",
       .fault_class = 'A',
       .subjects = {"autotp", "fsdp_tp", "megatron"},
       .summary = "A norm weight shared by all heads was whole on every tp rank, yet each rank saw "
                  "its own heads only; the parts were never summed.",
       .source = "Megatron-LM #7452 (finding 11)",
       .smallest_case = [] { return fault_case("qwen3", "autotp", {.dp = 3, .tp = 2}); },
       .injections = {skipped(Purpose::kGradReduce, Axis::kTp, {ParamClass::kQkNorm})},
       .expected = expect(Stage::kParameterGrad, "model.layers.0.self_attn.q_norm.weight",
                          any_rank(6), {CauseId::kRankLocalPartial, {{"axis", "tp"}}})});
  faults.push_back(row_bias_added_on_every_rank());
  // Copies are equal, so their sum is tp times each. (A call over tp would be one too many where a
  // rank's block has nothing of them.)
  faults.push_back(
      {.id = "row_bias_grad_times_tp",
       .fault_class = 'A',
       .subjects = {"autotp", "megatron"},
       .summary = "The gradient of a replicated row bias was summed over tp although every rank "
                  "already held all of it.",
       .source = "torchtitan #2106",
       .smallest_case = [] { return fault_case("gpt2", "autotp", {.dp = 2, .tp = 3}); },
       .injections = {scaled(Purpose::kGradReduce, Axis::kDp, FaultFactor::kTp,
                             {ParamClass::kRowBias})},
       .expected = expect(Stage::kParameterGrad, "transformer.h.0.attn.c_proj.bias", any_rank(6),
                          {CauseId::kScaleOfFormula, {{"scale", 3}, {"formula", "tp"}}})});
  Injection split_steps =
      skipped(Purpose::kGradReduce, Axis::kTp, {ParamClass::kNorm, ParamClass::kQkNorm});
  split_steps.least_micro_batches = 2;
  faults.push_back(
      {.id = "split_step_skips_tp_sum",
       .fault_class = 'A',
       .subjects = {"autotp", "megatron"},
       .summary = "A second way to run a step, used with several micro-batches, left "
                  "out the tp sum of replicated weights.",
       .source = "NeMo-RL #3716",
       .smallest_case =
           [] {
             return of_four_micro_batches(fault_case("qwen3", "megatron", {.dp = 3, .tp = 2}));
           },
       .injections = {std::move(split_steps)},
       .expected = expect(Stage::kParameterGrad, "model.layers.0.self_attn.q_norm.weight",
                          any_rank(6), {CauseId::kRankLocalPartial, {{"axis", "tp"}}})});
  add_sequence_parallel_reductions(faults);
}

}  // namespace isoshard
