// SPDX-License-Identifier: Apache-2.0
/// Classes A and E under sequence parallelism: gradients that stay a rank's part, and tokens that
/// are joined wrongly.
#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <utility>

#include "core/comm/tensor.h"
#include "core/observe/layer_name.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Case sequence_case(std::string_view model_type, const Degrees& degrees) {
  Case item = fault_case(model_type, "megatron", degrees);
  item.settings.sequence_parallel = true;
  return item;
}

// Sums over tp of the gradients of a class, of names that are chosen, if they are skipped.
std::shared_ptr<const CollectiveFault> skip_sums_of(
    ParamClass param_class, std::function<bool(const std::string& name)> chosen) {
  return skip_segments(
      [param_class, chosen = std::move(chosen)](const CallInfo& info, const Segment* segment) {
        return is_gradient_of(info, segment, Axis::kTp, param_class) && chosen(segment->name);
      });
}

Fault sp_final_norm_grad_partial() {
  Fault fault{.id = "sp_final_norm_grad_partial", .fault_class = 'A', .subjects = {"megatron"}};
  fault.summary =
      "Under sequence parallelism the last norm was not in the list of weights to sum over tp; "
      "each rank kept its own part.";
  fault.source = "Megatron-LM #1446, PR 1528";
  fault.smallest_case = [] { return sequence_case("llama", {.dp = 2, .tp = 3}); };
  fault.hooks.collective = [](const Case&) {
    return skip_sums_of(ParamClass::kNorm,
                        [](const std::string& name) { return layer_of(name).empty(); });
  };
  fault.expected = {Stage::kParameterGrad,
                    "model.norm.weight",
                    any_rank(6),
                    {CauseId::kRankLocalPartial, {{"axis", "tp"}, {"copies", 3}}}};
  return fault;
}

Fault sp_layer_norm_grads_partial() {
  Fault fault{.id = "sp_layer_norm_grads_partial", .fault_class = 'A', .subjects = {"megatron"}};
  fault.summary =
      "No layer norm gradient was summed over tp under sequence parallelism; the loss curve went "
      "flat early.";
  fault.source = "gpt-neox PR 1257; InternEvo PR 53";
  fault.smallest_case = [] { return sequence_case("qwen2", {.dp = 3, .tp = 2}); };
  fault.hooks.collective = [](const Case&) {
    return skip_sums_of(ParamClass::kNorm,
                        [](const std::string& name) { return !layer_of(name).empty(); });
  };
  fault.expected = {Stage::kParameterGrad,
                    "model.layers.0.input_layernorm.weight",
                    any_rank(6),
                    {CauseId::kRankLocalPartial, {{"axis", "tp"}}}};
  return fault;
}

Fault sp_row_bias_grad_partial() {
  Fault fault{.id = "sp_row_bias_grad_partial", .fault_class = 'A', .subjects = {"megatron"}};
  fault.summary =
      "A small replicated weight fed with sequence shards was not marked as such (a router in the "
      "thread); its tp copies trained apart.";
  fault.source = "Megatron-LM #599, PR 619";
  fault.smallest_case = [] { return sequence_case("gpt2", {.dp = 2, .tp = 3}); };
  fault.hooks.collective = [](const Case& item) {
    return skip_sums_of(
        ParamClass::kRowBias,
        [first = first_row_biases(item)](const std::string& name) { return first.contains(name); });
  };
  fault.expected = {Stage::kParameterGrad,
                    "transformer.h.0.attn.c_proj.bias",
                    any_rank(6),
                    {CauseId::kRankLocalPartial, {{"axis", "tp"}}}};
  return fault;
}

/// Joins what the ranks give as flat pieces of [sample x token] rows, instead of along the sequence
/// of each sample.
class FlatJoin final : public CollectiveFault {
 public:
  FlatJoin(std::int64_t samples, std::int64_t tokens) : samples_(samples), tokens_(tokens) {}
  bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllGather && call.info.purpose == Purpose::kSequenceGather &&
           samples_ > 1 && call.comm->size() > 1;
  }
  Work apply(const InterceptedCall& call) const override {
    Work work = call.pass();
    work.wait();
    // Pieces [tp, B, S / tp, H], of which the caller makes [B, S, H] by turning the first two dims:
    // so that it gets the flat join.
    const std::int64_t tp = call.comm->size();
    const at::Tensor pieces = tensor_of(call.output).view({samples_, tp, tokens_ / tp, -1});
    tensor_of(call.output).copy_(pieces.transpose(0, 1).contiguous().view({-1}));
    return {};
  }

 private:
  std::int64_t samples_, tokens_;
};

Fault token_index_ignores_batch() {
  Fault fault{.id = "token_index_ignores_batch", .fault_class = 'E', .subjects = {"megatron"}};
  fault.summary =
      "Local token numbers became global ones by one offset per rank, which holds for a single "
      "sample only.";
  fault.source = "torchtitan #3604";
  fault.smallest_case = [] { return sequence_case("llama", {.dp = 3, .tp = 2}); };
  fault.hooks.collective = [](const Case& item) {
    return std::make_shared<FlatJoin>(item.batch_size, item.seq_length);
  };
  fault.expected = {Stage::kForward,
                    "model.layers.0.self_attn.q_proj",
                    any_rank(6),
                    {CauseId::kTokensPermutedBetweenSamples}};
  return fault;
}

}  // namespace

void add_sequence_faults(Faults& faults) {
  for (Fault (*make)() : {sp_final_norm_grad_partial, sp_layer_norm_grads_partial,
                          sp_row_bias_grad_partial, token_index_ignores_batch}) {
    faults.push_back(make());
  }
}

}  // namespace isoshard
