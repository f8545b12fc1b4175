// SPDX-License-Identifier: Apache-2.0
/// Classes B to F of pipeline and context parallelism: divisors by cp, norms of stages, layers and
/// tokens in the wrong place.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/tensor.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Case context_case(std::string_view model_type, const Degrees& degrees) {
  return fault_case(model_type, "nd", degrees);
}

// Two layers a stage.
Case pipeline_case(std::string_view model_type, const Degrees& degrees, int micro_batches) {
  Case item = fault_case(model_type, "nd", degrees);
  item.config.num_layers = 2 * degrees.pp;
  item.model_name += fmt::format("_{}_layers", item.config.num_layers);
  item.micro_batches = micro_batches;
  return item;
}

// The average of gradients is multiplied.
std::shared_ptr<const CollectiveFault> scale_gradients_by(double factor) {
  SegmentChange change;
  change.matches = [](const CallInfo& info, const Segment*) {
    return info.purpose == Purpose::kGradReduce && info.axis == Axis::kDp;
  };
  change.after = [factor](const InterceptedCall&, ConstBuffer, Buffer result) {
    tensor_of(result).mul_(factor);
  };
  change.of_own_blocks = true;
  return change_segments(std::move(change));
}

Fault cp_divisor_missing() {
  Fault fault{.id = "cp_divisor_missing", .fault_class = 'B', .subjects = {"nd"}};
  fault.summary =
      "Loss and gradient divisors disagreed about the cp group; all gradients were cp times too "
      "large.";
  fault.source = "Megatron-LM #906, 5946e24b37";
  fault.smallest_case = [] { return context_case("llama", {.dp = 3, .cp = 2}); };
  fault.hooks.collective = [](const Case& item) { return scale_gradients_by(item.degrees.cp); };
  fault.expected = {Stage::kParameterGrad, "", any_rank(6), "scale 2 = cp"};
  return fault;
}

Fault seq_group_in_divisor() {
  Fault fault{.id = "seq_group_in_divisor", .fault_class = 'C', .subjects = {"nd"}};
  fault.summary =
      "Gradients were divided by data x sequence ranks though the loss was already shared out; "
      "noticed as a norm 4 times too small.";
  fault.source = "DeepSpeed #5555";
  fault.smallest_case = [] { return clipped(context_case("llama", {.dp = 2, .cp = 3})); };
  fault.hooks.collective = [](const Case& item) {
    return scale_gradients_by(1.0 / item.degrees.cp);
  };
  fault.expected = {Stage::kParameterGrad, "", any_rank(6), "scale 0.333"};
  return fault;
}

Fault clip_norm_per_stage() {
  Fault fault{.id = "clip_norm_per_stage", .fault_class = 'C', .subjects = {"nd"}};
  fault.summary = "Every pipeline stage clipped by the norm of its own weights.";
  fault.source = "torchtitan #596, #649";
  fault.smallest_case = [] { return clipped(pipeline_case("llama", {.pp = 3, .dp = 2}, 4)); };
  fault.hooks.collective = [](const Case&) { return skip_calls(Purpose::kClipNorm, Axis::kPp); };
  fault.expected = {Stage::kGradNorm, "grad_norm", any_rank(6),
                    "squares summed over pp give the reference"};
  return fault;
}

// Each exchange of a ring goes to the rank before and comes from the one behind.
class RingRunsBackwards final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kSendRecv && call.info.purpose == Purpose::kRingKv &&
           call.comm->size() > 2;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    const int size = call.comm->size(), rank = call.comm->rank();
    std::vector<Transfer> transfers(call.transfers.begin(), call.transfers.end());
    for (Transfer& transfer : transfers)
      transfer.peer = transfer.is_send ? (rank + size - 1) % size : (rank + 1) % size;
    return call.comm->send_recv(transfers);
  }
};

Fault ring_blocks_swapped() {
  Fault fault{.id = "ring_blocks_swapped", .fault_class = 'F', .subjects = {"nd"}};
  fault.summary =
      "Keys and values of the cp group were joined along the wrong dimension; queries met keys of "
      "other positions.";
  fault.source = "torchtitan #3206";
  fault.smallest_case = [] {
    Case item = context_case("llama", {.dp = 2, .cp = 3});
    item.settings.nd.context_attention = ContextAttention::kRing;
    return item;
  };
  // of three ranks: the blocks of turns 1 and 2 change places
  fault.hooks.collective = [](const Case&) { return std::make_shared<const RingRunsBackwards>(); };
  fault.expected = {Stage::kForward,
                    "model.layers.0.self_attn.core",
                    {1, 4},
                    "wrong on cp rank 1 where queries meet keys of other cp ranks"};
  return fault;
}

// Blocks of other ranks are read as [..., tokens, heads, D] and put back as [..., heads, tokens,
// D].
class MixesHeadsAndTokens final : public CollectiveFault {
 public:
  MixesHeadsAndTokens(std::int64_t samples, std::int64_t heads, std::int64_t tokens)
      : samples_(samples), heads_(heads), tokens_(tokens) {}
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllGather && call.info.purpose == Purpose::kRingKv &&
           call.comm->size() > 1;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    call.pass().wait();
    const at::Tensor blocks = tensor_of(call.output).view({call.comm->size(), -1});
    for (int rank = 0; rank < call.comm->size(); ++rank) {
      if (rank == call.comm->rank()) continue;
      // keys, then values
      const at::Tensor block = blocks[rank].view({2 * samples_, heads_, tokens_, -1});
      const at::Tensor read = block.reshape({2 * samples_, tokens_, heads_, -1}).transpose(1, 2);
      block.copy_(read.contiguous());
    }
    return Work();
  }

 private:
  std::int64_t samples_, heads_, tokens_;
};

Fault exchange_mixes_heads_and_sequence() {
  Fault fault{.id = "exchange_mixes_heads_and_sequence", .fault_class = 'E', .subjects = {"nd"}};
  fault.summary =
      "After an exchange over the sequence group, a reshape without a transpose mixed head and "
      "sequence places.";
  fault.source = "DeepSpeed #5664, #5823";
  fault.smallest_case = [] { return context_case("llama", {.dp = 3, .cp = 2}); };
  fault.hooks.collective = [](const Case& item) {
    return std::make_shared<const MixesHeadsAndTokens>(item.batch_size,
                                                       item.config.num_kv_heads / item.degrees.tp,
                                                       item.seq_length / item.degrees.cp);
  };
  fault.expected = {Stage::kForward, "model.layers.0.self_attn.core", any_rank(6),
                    "where queries meet keys of other cp ranks"};
  return fault;
}

// Positions of the ranks for which `is_wrong` holds start at 0.
void restart_positions(TrainerParts& parts, const FaultProbe& probe, bool is_wrong) {
  if (!is_wrong) return;
  parts.strategy = strategy_double(
      parts.strategy, {.token_positions = [probe](const Strategy& inner, std::int64_t length) {
        const at::Tensor right = inner.token_positions(length);
        if (!right.defined()) return right;  // all tokens are here
        return counted(probe, right, at::arange(length, at::kLong));
      }});
}

Fault rope_restarts_on_each_cp_rank() {
  Fault fault{.id = "rope_restarts_on_each_cp_rank", .fault_class = 'F', .subjects = {"nd"}};
  fault.summary =
      "The positions that came with the batch were overwritten by newly made sequential ones.";
  fault.source = "torchtitan #2780";
  fault.smallest_case = [] { return context_case("qwen2", {.dp = 2, .cp = 3}); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    restart_positions(parts, probe, true);
  };
  fault.expected = {Stage::kForward, "model.layers.0.self_attn.q_rope", any_rank(6),
                    "positions restart on every cp rank"};
  return fault;
}

Fault rope_table_whole_on_later_stages() {
  Fault fault{.id = "rope_table_whole_on_later_stages", .fault_class = 'F', .subjects = {"nd"}};
  fault.summary =
      "With pipeline stages, the position table that was split over cp was not the one the stages "
      "read.";
  fault.source = "torchtitan #792";
  fault.smallest_case = [] { return pipeline_case("qwen2", {.pp = 2, .cp = 3}, 4); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    restart_positions(parts, probe, mesh.coordinate(Axis::kPp) > 0);
  };
  fault.expected = {Stage::kForward,
                    "model.layers.2.self_attn.q_rope",
                    {3, 4, 5},
                    "positions restart on every cp rank"};
  return fault;
}

// "model.layers.2.mlp.up_proj.weight" with the layer's number less `first`.
std::string in_stage(const std::string& name, std::int64_t first) {
  const std::string layer = layer_of(name);
  if (layer.empty()) return name;
  const std::size_t dot = layer.rfind('.') + 1;
  const std::int64_t number = std::stoll(layer.substr(dot)) - first;
  return layer.substr(0, dot) + std::to_string(number) + name.substr(layer.size());
}

Fault stage_loads_local_layer_names() {
  Fault fault{.id = "stage_loads_local_layer_names", .fault_class = 'E', .subjects = {"nd"}};
  fault.summary = "Later pipeline stages loaded layers by the number inside the stage.";
  fault.source = "Megatron-LM #7452 (finding 12)";
  fault.smallest_case = [] { return pipeline_case("llama", {.pp = 2, .dp = 3}, 2); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    if (parts.stages == nullptr) return;
    const std::int64_t first = parts.stages->sections().front().first_layer;
    if (first == 0) return;
    parts.weights = weights_double(
        parts.weights, [first, probe](const WeightSource& inner, const ParameterSpec& spec,
                                      const Shape& offset, const Shape& size) {
          ParameterSpec local = spec;
          local.name = in_stage(spec.name, first);
          return counted(probe, inner.read(spec, offset, size), inner.read(local, offset, size));
        });
  };
  fault.expected = {Stage::kParametersRead,
                    "model.layers.2.self_attn.q_proj.weight",
                    {3, 4, 5},
                    "shards of pp rank 1"};
  return fault;
}

// Gradients that go to an earlier stage are divided by the number of micro-batches.
class DividesBetweenStages final : public CollectiveFault {
 public:
  explicit DividesBetweenStages(int micro_batches) : micro_batches_(micro_batches) {}
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    if (call.op != CollectiveOp::kSendRecv) return false;
    for (const Transfer& transfer : call.transfers) {
      if (transfer.is_send && transfer.info.purpose == Purpose::kPipeBackward) return true;
    }
    return false;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    for (const Transfer& transfer : call.transfers) {
      if (transfer.is_send && transfer.info.purpose == Purpose::kPipeBackward)
        tensor_of(transfer.data).div_(micro_batches_);
    }
    return call.pass();
  }

 private:
  int micro_batches_;
};

Fault scaled_again_at_each_stage() {
  Fault fault{.id = "scaled_again_at_each_stage", .fault_class = 'B', .subjects = {"nd"}};
  fault.summary =
      "Every pipeline stage divided the incoming gradient by the number of micro-batches, not the "
      "last stage alone.";
  fault.source = "DeepSpeed #8152, #8154";
  fault.smallest_case = [] { return pipeline_case("llama", {.pp = 3, .dp = 2}, 4); };
  fault.hooks.collective = [](const Case& item) {
    return std::make_shared<const DividesBetweenStages>(item.micro_batches);
  };
  fault.expected = {
      Stage::kActivationGrad, "model.layers.3", {2, 3}, "scale 0.25 = 1/micro-batches"};
  return fault;
}

// Where chunks of the sequence end on a rank, nothing is predicted.
Fault labels_shifted_after_cp_split() {
  Fault fault{.id = "labels_shifted_after_cp_split", .fault_class = 'D', .subjects = {"nd"}};
  fault.summary =
      "Labels were shifted inside each sequence shard; the last token of a chunk got a wrong "
      "target "
      "or none.";
  fault.source = "verl PR 4250";
  fault.smallest_case = [] { return context_case("llama", {.dp = 2, .cp = 3}); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case&, const FaultProbe& probe) {
    if (mesh.degree(Axis::kCp) == 1) return;
    parts.strategy = strategy_double(
        parts.strategy, {.loss = [probe](const Strategy& inner, const at::Tensor& logits,
                                         const at::Tensor& targets_BS, const at::Tensor& weight_B,
                                         double label_smoothing) {
          const at::Tensor positions = inner.token_positions(targets_BS.size(1));
          at::Tensor wrong = targets_BS.clone();
          for (std::int64_t t = 0; t < positions.numel(); ++t) {
            const bool is_end =
                t + 1 == positions.numel() ||
                positions[t + 1].item<std::int64_t>() != positions[t].item<std::int64_t>() + 1;
            if (is_end) wrong.select(1, t).fill_(-100);
          }
          return inner.loss(logits, counted(probe, targets_BS, wrong), weight_B, label_smoothing);
        }});
  };
  fault.expected = {Stage::kForward, "loss_per_dp_rank", any_rank(6),
                    "the tokens 3, 7, 15, 19 have no target"};
  return fault;
}

}  // namespace

void add_nd_faults(Faults& faults) {
  faults.push_back(cp_divisor_missing());
  faults.push_back(scaled_again_at_each_stage());
  faults.push_back(seq_group_in_divisor());
  faults.push_back(clip_norm_per_stage());
  faults.push_back(labels_shifted_after_cp_split());
  faults.push_back(exchange_mixes_heads_and_sequence());
  faults.push_back(stage_loads_local_layer_names());
  faults.push_back(rope_restarts_on_each_cp_rank());
  faults.push_back(rope_table_whole_on_later_stages());
  faults.push_back(ring_blocks_swapped());
}

}  // namespace isoshard
