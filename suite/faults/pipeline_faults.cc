// SPDX-License-Identifier: Apache-2.0
/// Faults of pipelines: what stages send, load, count and take for their own number.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/tensor.h"
#include "core/observe/layer_name.h"
#include "subjects/model/zoo/registry.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Fault clip_norm_per_stage() {
  Fault fault{.id = "clip_norm_per_stage", .fault_class = 'C', .subjects = {"nd"}};
  fault.summary = "Every pipeline stage clipped by the norm of its own weights.";
  fault.source = "torchtitan #596, #649";
  fault.smallest_case = [] { return clipped(pipeline_case("llama", {.pp = 3, .dp = 2}, 4)); };
  fault.hooks.collective = [](const Case&) { return skip_calls(Purpose::kClipNorm, Axis::kPp); };
  fault.expected = {
      Stage::kGradNorm, "grad_norm", any_rank(6), {CauseId::kSquaresNotSummed, {{"axis", "pp"}}}};
  return fault;
}

// "model.layers.2.mlp.up_proj.weight" with the layer's number less `first`.
std::string in_stage(const std::string& name, std::int64_t first) {
  const std::string layer(layer_of(name));
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
                    {CauseId::kNotSlices, {{"axis", "pp"}, {"ranks", std::vector{3, 4, 5}}}}};
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
  fault.expected = {Stage::kActivationGrad,
                    "model.layers.3",
                    {2, 3},
                    {CauseId::kScaleOfFormula, {{"scale", 0.25}, {"formula", "1/micro-batches"}}}};
  return fault;
}

Case interleaved(Case item) {
  item.settings.nd.pipeline_schedule = "Interleaved1F1B";
  item.settings.nd.stages_per_rank = 2;
  return item;
}

// Of one micro-batch the second half of what is sent is that of memory which was given back: zeros.
class SendsFreedOutput final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kSendRecv &&
           std::ranges::any_of(call.transfers, &SendsFreedOutput::is_output);
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    std::vector<Transfer> transfers(call.transfers.begin(), call.transfers.end());
    std::vector<at::Tensor> sent;
    for (Transfer& transfer : transfers) {
      if (!is_output(transfer)) continue;
      sent.push_back(tensor_of(transfer.data).clone());
      sent.back()
          .narrow(0, transfer.data.count / 2, transfer.data.count - transfer.data.count / 2)
          .zero_();
      transfer.data.data = static_cast<std::byte*>(sent.back().data_ptr());
    }
    call.comm->send_recv(transfers).wait();
    return Work();
  }

 private:
  static bool is_output(const Transfer& transfer) {
    return transfer.is_send && transfer.info.purpose == Purpose::kPipeForward &&
           transfer.info.segments.front().name.ends_with("micro-batch 2");
  }
};

Fault stage_output_freed_before_send() {
  Fault fault{.id = "stage_output_freed_before_send", .fault_class = 'L', .subjects = {"nd"}};
  fault.summary = "A stage freed its output while the asynchronous send still copied it.";
  fault.source = "Megatron-LM #4047";
  fault.smallest_case = [] { return interleaved(pipeline_case("llama", {.pp = 2, .dp = 3}, 4)); };
  fault.hooks.collective = [](const Case&) { return std::make_shared<const SendsFreedOutput>(); };
  fault.expected = {Stage::kForward,
                    "model.layers.1.input_layernorm",
                    {3, 4, 5},
                    {CauseId::kReceivedOther,
                     {{"pp_rank", 1}, {"other_pp_rank", 0}, {"micro_batches", std::vector{2}}}}};
  return fault;
}

// Of the tied weight, the gradient that this rank put into the average over dp goes to the other
// stage, not the average.
class SendsLocalTiedGradient final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.info.purpose == Purpose::kGradReduce &&
           (call.op == CollectiveOp::kReduceScatter ||
            (call.op == CollectiveOp::kSendRecv && call.info.axis == Axis::kPp));
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    if (call.op == CollectiveOp::kReduceScatter) {
      *call.acted = false;
      keep(call);
      return call.pass();
    }
    if (!local_.defined()) {  // of one dp rank the average is its own gradient
      *call.acted = false;
      return call.pass();
    }
    std::vector<Transfer> transfers(call.transfers.begin(), call.transfers.end());
    for (Transfer& transfer : transfers)
      if (transfer.is_send) transfer.data.data = static_cast<std::byte*>(local_.data_ptr());
    call.comm->send_recv(transfers).wait();
    return Work();
  }

 private:
  // Of this rank's block of the summand.
  void keep(const InterceptedCall& call) const {
    if (call.comm->size() == 1) return;
    const std::int64_t begin = call.comm->rank() * call.output.count;
    for (const Segment& segment : call.info.segments) {
      const bool is_own = segment.offset >= begin && segment.offset < begin + call.output.count;
      if (segment.param_class != ParamClass::kTied || !is_own) continue;
      const Buffer whole{const_cast<std::byte*>(call.input.data), call.input.count,
                         call.input.dtype};
      local_ = tensor_of(whole).narrow(0, segment.offset, segment.count).clone();
    }
  }

  mutable at::Tensor local_;  ///< each rank has its process
};

Fault tied_sum_after_dp_scatter() {
  Fault fault{.id = "tied_sum_after_dp_scatter", .fault_class = 'G', .subjects = {"nd"}};
  fault.summary =
      "Gradients were scattered over dp before the two copies of the tied weight were added over "
      "pp; reduced and local parts mixed.";
  fault.source = "Megatron-LM #844";
  fault.smallest_case = [] {
    Case item = pipeline_case("qwen2", {.pp = 2, .dp = 3}, 4);
    item.config.tie_word_embeddings = true;
    item.model_name += "_tied";
    return item;
  };
  fault.hooks.collective = [](const Case&) {
    return std::make_shared<const SendsLocalTiedGradient>();
  };
  fault.expected = {Stage::kParameterGrad,
                    "model.embed_tokens.weight",
                    any_rank(6),
                    {CauseId::kCopiesDiffer, {{"axes", "pp"}}}};
  return fault;
}

// The first of a rank's stages trains, the others evaluate.
Fault eval_mode_kept_on_later_chunks() {
  Fault fault{.id = "eval_mode_kept_on_later_chunks", .fault_class = 'M', .subjects = {"nd"}};
  fault.summary = "After validation only the first model chunk went back to training mode.";
  fault.source = "NeMo PR 14152";
  fault.smallest_case = [] {
    Case item = interleaved(pipeline_case("gpt2", {.pp = 2, .dp = 3}, 4));
    set_dropout(item.config, 0.1);
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    if (parts.stages == nullptr) return;
    const std::int64_t first = parts.stages->sections().front().first_layer;
    parts.model = model_double(
        parts.model, [inner = parts.model, first, probe](
                         const at::Tensor& ids_BS, const Parameters& parameters,
                         const Strategy& strategy, Sink* sink, const TrainingPass& training) {
          TrainingPass pass = training;
          if (training.section.first_layer != first && pass.streams != nullptr) {
            pass.streams = nullptr;
            probe.fired();
          }
          return inner->forward(ids_BS, parameters, strategy, sink, pass);
        });
  };
  fault.expected = {
      Stage::kMasks, "transformer.h.2.attn.attn_dropout", {0, 1, 2}, {CauseId::kNothingDropped}};
  return fault;
}

// Scores are divided by the number of the layer; a double of one that does not divide them makes up
// for the right number first.
Fault attn_scale_uses_local_layer_number() {
  Fault fault{.id = "attn_scale_uses_local_layer_number", .fault_class = 'M', .subjects = {"nd"}};
  fault.summary = "A per-layer attention scale used the number of the layer inside its stage.";
  fault.source = "Megatron-LM 0504e973d8";
  fault.smallest_case = [] { return pipeline_case("gpt2", {.pp = 2, .dp = 3}, 4); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    if (parts.stages == nullptr) return;
    const std::int64_t first = parts.stages->sections().front().first_layer;
    if (first == 0) return;
    parts.strategy = strategy_double(
        parts.strategy, {.attention = [first, probe](const Strategy& inner, std::string_view module,
                                                     const AttentionInputs& in) {
          const std::string layer(layer_of(module));
          const double number = 1 + std::stod(layer.substr(layer.rfind('.') + 1));
          const double wrong = number / (number - static_cast<double>(first));
          return inner.attention(module, counted(probe, in.q_BNSD, in.q_BNSD * wrong), in.k_BKSD,
                                 in.v_BKSD, in.impl, in.softmax, in.dropout);
        }});
  };
  fault.expected = {Stage::kForward,
                    "transformer.h.2.attn.core",
                    {3, 4, 5},
                    {CauseId::kScoresScaledByRatio, {{"scale", 3}}}};
  return fault;
}

}  // namespace

void add_pipeline_faults(Faults& faults) {
  faults.push_back(scaled_again_at_each_stage());
  faults.push_back(clip_norm_per_stage());
  faults.push_back(stage_loads_local_layer_names());
  faults.push_back(tied_sum_after_dp_scatter());
  faults.push_back(stage_output_freed_before_send());
  faults.push_back(eval_mode_kept_on_later_chunks());
  faults.push_back(attn_scale_uses_local_layer_number());
}

}  // namespace isoshard
