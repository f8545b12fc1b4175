// SPDX-License-Identifier: Apache-2.0
/// Faults of context parallelism: divisors by cp, blocks and tokens in the wrong place.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Case context_case(std::string_view model_type, const Degrees& degrees) {
  return fault_case(model_type, "nd", degrees);
}

/// What a rank knows of its last targets.
struct TargetCounts {
  double mean_of_ranks = 1, own = 1;
};

class CountsTargets final : public TokenSplit {
 public:
  CountsTargets(std::shared_ptr<const TokenSplit> inner, std::shared_ptr<TargetCounts> counts)
      : inner_(std::move(inner)), counts_(std::move(counts)) {}
  [[nodiscard]] int degree() const noexcept override { return inner_->degree(); }
  [[nodiscard]] at::Tensor own_tokens(const at::Tensor& whole_BS) const override {
    at::Tensor own = inner_->own_tokens(whole_BS);
    counts_->mean_of_ranks = whole_BS.ne(-100).sum().item<double>() / degree();
    counts_->own = own.ne(-100).sum().item<double>();
    return own;
  }
  [[nodiscard]] Communicator& sharers() const noexcept override { return inner_->sharers(); }

 private:
  std::shared_ptr<const TokenSplit> inner_;
  std::shared_ptr<TargetCounts> counts_;
};

Fault cp_local_token_mean() {
  Fault fault{.id = "cp_local_token_mean", .fault_class = 'B', .subjects = {"nd"}};
  fault.summary =
      "Each cp rank divided by its own count of valid tokens before the average over cp.";
  fault.source = "Megatron-LM #7452 (findings 3, 9), PR 7513";
  fault.smallest_case = [] {
    Case item = context_case("llama", {.dp = 2, .cp = 3});
    item.data.unequal_labels = true;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    if (parts.token_split == nullptr) return;
    const auto counts = std::make_shared<TargetCounts>();
    parts.token_split = std::make_shared<CountsTargets>(parts.token_split, counts);
    parts.strategy = strategy_double(
        parts.strategy, {.loss = [probe, counts](const Strategy& inner, LossInputs in) {
          const double factor = counts->mean_of_ranks / std::max(counts->own, 1.0);
          in.weight_B = counted(probe, in.weight_B, in.weight_B * factor);
          return in.loss_by(inner);
        }});
  };
  fault.expected =
      expect(Stage::kForward, "loss_backward", any_rank(6), {CauseId::kMeanOfCpRankMeans});
  return fault;
}

// In the dtype of the gradients, in which 1/cp is rounded first.
Fault seq_group_in_divisor() {
  Fault fault{.id = "seq_group_in_divisor", .fault_class = 'C', .subjects = {"nd"}};
  fault.summary =
      "Gradients were divided by data x sequence ranks though the loss was already shared out; "
      "noticed as a norm 4 times too small.";
  fault.source = "DeepSpeed #5555";
  fault.smallest_case = [] { return clipped(context_case("llama", {.dp = 2, .cp = 3})); };
  fault.hooks.collective = [](const Case& item) {
    SegmentChange change;
    change.matches = [](const CallInfo& info, const Segment*) {
      return info.purpose == Purpose::kGradReduce && info.axis == Axis::kDp;
    };
    change.after = [factor = 1.0 / item.degrees.cp](const InterceptedCall&, ConstBuffer,
                                                    Buffer result) {
      tensor_of(result).mul_(factor);
    };
    change.of_own_blocks = true;
    return change_segments(std::move(change));
  };
  fault.expected = expect(Stage::kParameterGrad, "", any_rank(6),
                          {CauseId::kScaleOfFormula, {{"scale", 0.333}}});
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
  fault.expected = expect(Stage::kForward, "model.layers.0.self_attn.core", {1, 4},
                          {CauseId::kCpChunksInWrongOrder, {{"tensors", "keys and values"}}});
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
  fault.expected = expect(Stage::kForward, "model.layers.0.self_attn.core", any_rank(6),
                          {CauseId::kWrongWithForeignKeys});
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
    parts.strategy =
        strategy_double(parts.strategy, {.loss = [probe](const Strategy& inner, LossInputs in) {
                          const at::Tensor positions = inner.token_positions(in.targets_BS.size(1));
                          at::Tensor wrong = in.targets_BS.clone();
                          for (std::int64_t t = 0; t < positions.numel(); ++t) {
                            const bool is_end = t + 1 == positions.numel() ||
                                                positions[t + 1].item<std::int64_t>() !=
                                                    positions[t].item<std::int64_t>() + 1;
                            if (is_end) wrong.select(1, t).fill_(-100);
                          }
                          in.targets_BS = counted(probe, in.targets_BS, wrong);
                          return in.loss_by(inner);
                        }});
  };
  fault.expected =
      expect(Stage::kForward, "loss_per_dp_rank", any_rank(6),
             {CauseId::kLastTargetsMissing, {{"positions", std::vector{3, 7, 15, 19}}}});
  return fault;
}

}  // namespace

void add_context_faults(Faults& faults) {
  faults.push_back(
      {.id = "cp_divisor_missing",
       .fault_class = 'B',
       .subjects = {"nd"},
       .summary = "Loss and gradient divisors disagreed about the cp group; all gradients were cp "
                  "times too large.",
       .source = "Megatron-LM #906, 5946e24b37",
       .smallest_case = [] { return context_case("llama", {.dp = 3, .cp = 2}); },
       .injections = {scaled(Purpose::kGradReduce, Axis::kDp, FaultFactor::kCp)},
       .expected = expect(Stage::kParameterGrad, "", any_rank(6),
                          {CauseId::kScaleOfFormula, {{"scale", 2}, {"formula", "cp"}}})});
  faults.push_back(cp_local_token_mean());
  faults.push_back(seq_group_in_divisor());
  faults.push_back(labels_shifted_after_cp_split());
  faults.push_back(exchange_mixes_heads_and_sequence());
  faults.push_back(
      {.id = "rope_restarts_on_each_cp_rank",
       .fault_class = 'F',
       .subjects = {"nd"},
       .summary =
           "The positions that came with the batch were overwritten by newly made sequential ones.",
       .source = "torchtitan #2780",
       .smallest_case = [] { return context_case("qwen2", {.dp = 2, .cp = 3}); },
       .injections = {{.point = FaultPoint::kPositions, .change = FaultChange::kRestart}},
       .expected = expect(Stage::kForward, "model.layers.0.self_attn.q_rope", any_rank(6),
                          {CauseId::kPositionsRestart})});
  faults.push_back(
      {.id = "rope_table_whole_on_later_stages",
       .fault_class = 'F',
       .subjects = {"nd"},
       .summary = "With pipeline stages, the position table that was split over cp was not the one "
                  "the stages read.",
       .source = "torchtitan #792",
       .smallest_case = [] { return pipeline_case("qwen2", {.pp = 2, .cp = 3}, 4); },
       .injections = {{.point = FaultPoint::kPositions,
                       .change = FaultChange::kRestart,
                       .ranks = FaultRanks{Axis::kPp, 0, /*are_others=*/true}}},
       .expected = expect(Stage::kForward, "model.layers.2.self_attn.q_rope", {3, 4, 5},
                          {CauseId::kPositionsRestart})});
  faults.push_back(ring_blocks_swapped());
}

}  // namespace isoshard
