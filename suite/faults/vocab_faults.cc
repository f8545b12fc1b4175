// SPDX-License-Identifier: Apache-2.0
/// Faults of a vocabulary that is split over tp: of its head's gradient, its loss, its padding and
/// its smoothed labels.
#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "subjects/parallel/tensor/autotp_plan.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

/// A tiny Llama with its vocabulary split over tp.
Case vocab_case(const Degrees& degrees) {
  Case item = fault_case("llama", "autotp", degrees);
  item.settings.make_vocab_size_divisible_by = 1;
  return item;
}

/// The head runs on pieces of the sequence, which frees each piece's logits early, and so does its
/// backward.
void run_head_in_chunks(TrainerParts& parts, Mesh&, const Case&, const FaultProbe&) {
  const auto linear = [plan = parts.plan](const Strategy& inner, std::string_view module,
                                          const at::Tensor& x_BSH, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, Sink* sink) {
    if (plan.kind_of_module(module) != ShardKind::kVocabHead)
      return inner.linear(module, x_BSH, weight, bias, sink);
    constexpr std::int64_t kChunks = 4;
    std::vector<at::Tensor> logits;
    for (const at::Tensor& chunk : x_BSH.tensor_split(kChunks, 1))
      logits.push_back(inner.linear(module, chunk, weight, bias, sink));
    return at::cat(logits, 1);
  };
  parts.strategy = strategy_double(parts.strategy, {.linear = linear});
}

Fault chunk_loss_partial_as_replicated() {
  Fault fault{.id = "chunk_loss_partial_as_replicated",
              .fault_class = 'D',
              .subjects = {"autotp", "fsdp_tp"}};
  fault.summary =
      "A chunked loss stored the hidden gradient under the wrong label; per-rank partial sums "
      "passed for the full one.";
  fault.source = "torchtitan #3412";
  fault.smallest_case = [] { return vocab_case({.dp = 2, .tp = 3}); };
  fault.hooks.parts = run_head_in_chunks;
  // Without chunks a call is for all tokens of the micro-batch, and the fault does not fire.
  fault.hooks.collective = [](const Case& item) {
    return skip_segments([whole = item.batch_size * item.seq_length * item.config.hidden_size](
                             const CallInfo& info, const Segment* segment) {
      return info.purpose == Purpose::kVocabParallelBackward && segment != nullptr &&
             segment->count < whole;
    });
  };
  fault.expected = expect(Stage::kActivationGrad, "model.norm", any_rank(6),
                          {CauseId::kRankLocalPartial, {{"axis", "tp"}}});
  return fault;
}

/// Columns of padding, whose zero rows give logits of 0, take part in maximum and sum.
class PaddedColumns final : public CollectiveFault {
 public:
  explicit PaddedColumns(ShardPlan plan) : plan_(std::move(plan)) {}

  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.info.purpose == Purpose::kVocabParallelMax ||
           call.info.purpose == Purpose::kVocabParallelLogsumexp;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    const VocabShard shard = plan_.vocab_shard(call.comm->rank());
    const auto padding = static_cast<double>(shard.rows - shard.count);
    const at::Tensor values = tensor_of(call.output);
    *call.acted = false;  // a larger maximum alone leaves the loss as it is
    if (call.info.purpose == Purpose::kVocabParallelMax) {
      if (padding > 0) values.clamp_min_(0);
      call.pass().wait();
      largest_ = values.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
      return {};
    }
    const at::Tensor sum = values.clone();
    values.add_(at::exp(-largest_) * padding);
    *call.acted = !at::equal(values, sum);
    return call.pass();
  }

 private:
  ShardPlan plan_;
  // of the loss under way; every rank is a process with a copy of its own
  mutable at::Tensor largest_;
};

Fault padded_vocab_in_softmax() {
  Fault fault{
      .id = "padded_vocab_in_softmax", .fault_class = 'D', .subjects = {"autotp", "megatron"}};
  fault.summary = "Padding rows of the vocabulary took part in the softmax.";
  fault.source = "BioNeMo PR 631";
  fault.smallest_case = [] {
    Case item = vocab_case({.dp = 3, .tp = 2});
    item.config.vocab_size = 97;
    item.model_name += "_v97";
    item.settings.make_vocab_size_divisible_by = 64;
    return item;
  };
  fault.hooks.collective = [](const Case& item) {
    const auto model = make_model(item.config, item.attention);
    return std::make_shared<PaddedColumns>(
        autotp_plan(*model, item.degrees.tp, item.settings.make_vocab_size_divisible_by));
  };
  fault.expected = expect(Stage::kForward, "loss_per_dp_rank", any_rank(6),
                          {CauseId::kOffsetOfWidths, {{"padded", 128}, {"width", 97}}});
  return fault;
}

}  // namespace

void add_vocab_faults(Faults& faults) {
  faults.push_back({.id = "head_input_grad_partial",
                    .fault_class = 'A',
                    .subjects = {"autotp", "fsdp_tp", "megatron"},
                    .summary =
                        "The vocabulary-split loss had the right value but never summed the hidden "
                        "gradient over the vocabulary shards.",
                    .source = "ml-cross-entropy PR 42",
                    .smallest_case = [] { return vocab_case({.dp = 2, .tp = 3}); },
                    .injections = {skipped(Purpose::kVocabParallelBackward, Axis::kTp)},
                    .expected = expect(Stage::kActivationGrad, "model.norm", any_rank(6),
                                       {CauseId::kRankLocalPartial, {{"axis", "tp"}}})});
  faults.push_back(chunk_loss_partial_as_replicated());
  // own / (V / tp) = own tp / V
  Injection own_columns = scaled(Purpose::kVocabParallelSmoothing, Axis::kTp, FaultFactor::kTp);
  own_columns.side = FaultSide::kGiven;
  faults.push_back(
      {.id = "label_smoothing_local_vocab",
       .fault_class = 'D',
       .subjects = {"autotp", "fsdp_tp", "megatron"},
       .summary =
           "Label smoothing used the size and the mean log-probability of the local vocabulary "
           "shard.",
       .source = "Megatron-LM #737, #7464",
       .smallest_case =
           [] {
             Case item = vocab_case({.dp = 3, .tp = 2});
             item.settings.label_smoothing = 0.1;
             return item;
           },
       .injections = {skipped(Purpose::kVocabParallelSmoothing, Axis::kTp), std::move(own_columns)},
       .expected = expect(Stage::kForward, "loss_per_dp_rank", any_rank(6),
                          {CauseId::kRankLocal, {{"axis", "tp"}, {"copies", 2}}})});
  // Every rank has all columns, so the sum over ranks counts each of them tp times.
  faults.push_back(
      {.id = "gathered_logits_in_split_loss",
       .fault_class = 'D',
       .subjects = {"autotp", "fsdp_tp", "megatron"},
       .summary =
           "Logits already gathered over tp went into the loss that sums over vocabulary shards.",
       .source = "Megatron-LM #7452 (finding 2)",
       .smallest_case = [] { return vocab_case({.dp = 2, .tp = 3}); },
       .injections = {scaled(Purpose::kVocabParallelLogsumexp, Axis::kTp, FaultFactor::kTp)},
       .expected = expect(Stage::kForward, "loss_per_dp_rank", any_rank(6),
                          {CauseId::kOffsetOfDegree, {{"offset", 1.099}, {"axis", "tp"}}})});
  faults.push_back(padded_vocab_in_softmax());
}

}  // namespace isoshard
