// SPDX-License-Identifier: Apache-2.0
/// Legal differences in order: of sums, of buckets and micro-batches, of ranks on the mesh, of
/// samples at the end of an epoch.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/comm/tensor.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/parallel/wrapped_data_parallel.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

Injection set(std::string setting, std::string value) {
  return {.point = FaultPoint::kSetting,
          .name = std::move(setting),
          .change = FaultChange::kSet,
          .value = std::move(value)};
}

/// Each gradient bucket is reduced to shards, which are then gathered.
class ScatterAndGather final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllReduce && call.info.purpose == Purpose::kGradReduce &&
           call.comm->size() > 1;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    const std::int64_t size = call.comm->size(), count = (call.output.count + size - 1) / size;
    const at::Tensor whole = tensor_of(call.output);
    at::Tensor padded = at::constant_pad_nd(whole, {0, count * size - whole.numel()}),
               own = at::empty({count}, padded.options());
    const CallInfo info{call.info.purpose, call.info.axis, {}};
    call.comm->reduce_scatter(buffer_of(padded), buffer_of(own), call.reduction, info).wait();
    call.comm->all_gather(buffer_of(own), buffer_of(padded), info).wait();
    whole.copy_(padded.narrow(0, 0, whole.numel()));
    return {};
  }

 private:
  static Buffer buffer_of(const at::Tensor& tensor) {
    return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.numel(), dtype_of(tensor)};
  }
};

Fault sum_order_scatter() {
  Fault miss{.id = "sum_order_scatter", .subjects = {"ddp", "autotp"}};
  miss.summary = "Reduce-scatter plus gather, around a ring, instead of one all-reduce.";
  miss.smallest_case = [] { return fault_case("llama", "ddp", {.dp = 3}); };
  miss.injections = {set("reduction_order", "ring")};
  miss.hooks.collective = [](const Case&) { return std::make_shared<ScatterAndGather>(); };
  return miss;
}

Fault sum_order_split_k() {
  Fault miss{.id = "sum_order_split_k", .subjects = {"ddp", "autotp"}};
  miss.summary = "Matrix products are added up from pieces of the summed dimension.";
  miss.smallest_case = [] { return fault_case("qwen2", "ddp", {.dp = 3}); };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    const auto linear = [probe](const Strategy& inner, std::string_view module, const at::Tensor& x,
                                const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                Sink* sink) {
      constexpr std::int64_t kPieces = 5;
      const auto x_pieces = x.tensor_split(kPieces, -1),
                 weight_pieces = weight.tensor_split(kPieces, -1);
      at::Tensor sum = inner.linear(module, x_pieces[0], weight_pieces[0], bias, sink);
      for (std::size_t i = 1; i < x_pieces.size(); ++i)
        sum = sum + inner.linear(module, x_pieces[i], weight_pieces[i], std::nullopt, sink);
      probe.fired();
      return sum;
    };
    parts.strategy = strategy_double(parts.strategy, {.linear = linear});
  };
  return miss;
}

Case bf16_case(const char* subject, const Degrees& degrees) {
  Case item = fault_case("qwen2", subject, degrees);
  item.dtype = Dtype::kBFloat16;
  return item;
}

/// The sum is made in fp32, in any order, and rounded once.
class WideReduction final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllReduce && call.info.purpose == Purpose::kGradReduce &&
           call.output.dtype == Dtype::kBFloat16;
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    const at::Tensor narrow = tensor_of(call.output), wide = narrow.to(at::kFloat);
    all_reduce(*call.comm, wide, call.reduction, call.info).wait();
    narrow.copy_(wide);
    return {};
  }
};

Fault bf16_hops_fp32_sum() {
  Fault miss{.id = "bf16_hops_fp32_sum", .subjects = {"ddp", "autotp"}};
  miss.summary = "Gradients in bf16 are added around a ring in fp32 and rounded once.";
  miss.smallest_case = [] { return bf16_case("ddp", {.dp = 3}); };
  miss.injections = {set("reduction_order", "ring")};
  miss.hooks.collective = [](const Case&) { return std::make_shared<WideReduction>(); };
  return miss;
}

/// Has no sums before the end of the step.
class SummandsApart final : public WrappedDataParallel {
 public:
  using WrappedDataParallel::WrappedDataParallel;
  [[nodiscard]] AccumulatedGradients accumulated() const override { return {}; }
};

/// Takes what a micro-batch left in the gradients. Before the last one it puts back the sum of all,
/// in `type`, last one first.
std::shared_ptr<const Model> add_up_in(at::ScalarType type, TrainerParts& parts, int micro_batches,
                                       const FaultProbe& probe) {
  const auto taken = std::make_shared<std::vector<NamedTensors>>();
  parts.data_parallel = std::make_unique<SummandsApart>(std::move(parts.data_parallel));
  return accumulation_double(
      parts.model, micro_batches, [=](const Parameters& parameters, int micro_batch) {
        const at::NoGradGuard no_grad;
        if (micro_batch == 1) taken->clear();
        NamedTensors& own = taken->emplace_back();
        for (const auto& [name, parameter] : parameters) {
          own[name] = parameter.grad().to(type, /*non_blocking=*/false, /*copy=*/true);
          parameter.mutable_grad().reset();
        }
        if (micro_batch + 1 < micro_batches) return;
        for (const auto& [name, parameter] : parameters) {
          at::Tensor sum = taken->back().at(name);
          for (auto earlier = taken->rbegin() + 1; earlier != taken->rend(); ++earlier)
            sum = sum + earlier->at(name);
          parameter.mutable_grad() = sum.to(parameter.scalar_type());
        }
        probe.fired();
      });
}

Fault bucketing_micro_batches() {
  Fault miss{.id = "bucketing_micro_batches", .subjects = {"ddp", "autotp"}};
  miss.summary = "Gradients of micro-batches add up in another order.";
  miss.smallest_case = [] {
    Case item = fault_case("llama", "autotp", {.dp = 3, .tp = 2});
    item.micro_batches = 4;
    return item;
  };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case& item, const FaultProbe& probe) {
    if (item.micro_batches > 2)
      parts.model = add_up_in(scalar_type_of(item.dtype), parts, item.micro_batches, probe);
  };
  return miss;
}

Fault bucketing_main_grads() {
  Fault miss{.id = "bucketing_main_grads", .subjects = {"ddp", "autotp"}};
  miss.summary = "Gradients of micro-batches in bf16 add up in fp32.";
  miss.smallest_case = [] {
    Case item = bf16_case("ddp", {.dp = 3});
    item.micro_batches = 4;
    return item;
  };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case& item, const FaultProbe& probe) {
    if (item.micro_batches > 2)
      parts.model = add_up_in(at::kFloat, parts, item.micro_batches, probe);
  };
  return miss;
}

Fault declared_layout() {
  Fault miss{.id = "declared_layout", .subjects = {"autotp"}};
  miss.summary =
      "tp is the slow axis of the mesh, and is declared so: neighboring ranks are replicas.";
  miss.smallest_case = [] {
    Case item = fault_case("qwen3", "autotp", {.dp = 3, .tp = 2});
    item.mesh_order = {Axis::kTp, Axis::kDp};
    return item;
  };
  miss.hooks.parts = [](TrainerParts&, Mesh& mesh, const Case& item, const FaultProbe& probe) {
    Case usual = item;
    usual.mesh_order.clear();
    if (mesh.coordinate(Axis::kTp) != usual.mesh().coordinate(mesh.rank(), Axis::kTp))
      probe.fired();
  };
  return miss;
}

/// Fires when a sample is seen a second time.
Fault at_the_end_of_an_epoch(std::string id, std::string summary, TailPolicy tail) {
  Fault miss{.id = std::move(id), .subjects = {"ddp", "autotp"}, .summary = std::move(summary)};
  miss.smallest_case = [tail] {
    Case item = fault_case("qwen2", "ddp", {.dp = 3});
    item.data.kind = DataSource::Kind::kText;
    item.data.path = kShortText;
    item.data.shuffle = true;
    item.data.tail = tail;
    item.config.vocab_size = 128;
    item.model_name += "_v128";
    item.steps = 2;
    return item;
  };
  miss.hooks.data = [](std::vector<Batch>& micro_batches, const CaseData& data, const Case&, int,
                       int step, const FaultProbe& probe) {
    std::vector<std::int64_t> earlier;
    for (int s = 0; s < step; ++s) {
      for (const TokenBatch& batch : data.global_batches(s))
        earlier.insert(earlier.end(), batch.sample_ids.begin(), batch.sample_ids.end());
    }
    for (const Batch& batch : micro_batches) {
      for (const std::int64_t sample : batch.sample_ids) {
        if (std::find(earlier.begin(), earlier.end(), sample) != earlier.end()) probe.fired();
      }
    }
  };
  return miss;
}

Fault ragged_epoch() {
  return at_the_end_of_an_epoch(
      "ragged_epoch",
      "The sampler fills up the last batch of an epoch with samples that it has given before.",
      TailPolicy::kPad);
}

Fault ragged_epoch_drop() {
  return at_the_end_of_an_epoch(
      "ragged_epoch_drop",
      "The sampler drops the samples at the end of an epoch that fill no batch.",
      TailPolicy::kDrop);
}

Fault ragged_epoch_slow_rank() {
  Fault miss{.id = "ragged_epoch_slow_rank", .subjects = {"ddp", "autotp"}};
  miss.summary = "One rank is slow: it does other work before each of its collectives.";
  miss.smallest_case = [] { return fault_case("qwen2", "autotp", {.dp = 2, .tp = 3}); };
  miss.hooks.tap = [](const Case&, int rank) -> TapMutation {
    return [rank](const Site& site, at::Tensor value) {
      if (rank != 1 || !site.name.ends_with("layernorm")) return value;
      const at::Tensor work = at::ones({256, 256});
      for (int i = 0; i < 8; ++i) (void)at::mm(work, work);
      return value.alias();
    };
  };
  return miss;
}

}  // namespace

void add_benign_variations(Faults& faults) {
  const auto with_setting = [&](std::string id, std::string summary, Case (*smallest_case)(),
                                const char* setting, const char* value) {
    faults.push_back({.id = std::move(id),
                      .subjects = {"ddp", "autotp"},
                      .summary = std::move(summary),
                      .smallest_case = smallest_case,
                      .injections = {set(setting, value)}});
  };
  Case (*const on_ddp)() = [] { return fault_case("qwen2", "ddp", {.dp = 3}); };
  with_setting(
      "sum_order", "Gradients and activations are added around a ring instead of in rank order.",
      [] { return fault_case("qwen2", "autotp", {.dp = 2, .tp = 3}); }, "reduction_order", "ring");
  with_setting(
      "sum_order_tree", "Gradients and activations are added in pairs, and pairs of pairs.",
      [] { return fault_case("qwen2", "autotp", {.dp = 5}); }, "reduction_order", "tree");
  faults.push_back(sum_order_scatter());
  faults.push_back(sum_order_split_k());
  with_setting(
      "bf16_hops", "bf16 is rounded at every hop of a ring, not once.",
      [] { return bf16_case("autotp", {.dp = 2, .tp = 3}); }, "reduction_order", "ring");
  faults.push_back(bf16_hops_fp32_sum());
  with_setting("bucketing", "One bucket per few tensors instead of one flat buffer.", on_ddp,
               "bucket_bytes", "4096");
  with_setting("bucketing_per_tensor", "One call per tensor instead of one flat buffer.", on_ddp,
               "bucket_bytes", "1");
  for (Fault (*make)() : {bucketing_micro_batches, bucketing_main_grads, declared_layout,
                          ragged_epoch, ragged_epoch_drop, ragged_epoch_slow_rank})
    faults.push_back(make());
  with_setting(
      "ragged_epoch_recompute",
      "Layers are run again in backward, where the reference keeps what they computed.",
      [] {
        Case item = fault_case("gpt2", "autotp", {.dp = 2, .tp = 3});
        set_dropout(item.config, 0.1);
        return item;
      },
      "recompute_every", "1");
}

}  // namespace isoshard
