// SPDX-License-Identifier: Apache-2.0
/// Class A: reductions that are missing or happen once too often.
#include <ATen/ATen.h>

#include "conformance/detection/catalogue.h"

namespace isoshard {
namespace {

Fault mlp_input_grad_partial() {
  Fault fault{.id = "mlp_input_grad_partial", .fault_class = 'A', .subjects = {"autotp"}};
  fault.summary = "The input gradient of column-split weights stayed a partial sum on each rank; forward right, everything upstream wrong.";
  fault.source = "torchtitan #1805, #1878";
  fault.smallest_case = [] { return fault_case("qwen2", "autotp", 3, 2); };
  fault.hooks.collective = [](const Case&) {
    return skip_segments([](const CallInfo& info, const Segment* segment) {
      return info.purpose == Purpose::kColumnParallelBackward && segment != nullptr && segment->name.starts_with("model.layers.1.mlp.");
    });
  };
  fault.expected = {Stage::kActivationGrad, "model.layers.1.post_attention_layernorm", any_rank(6), "rank-local partial over tp"};
  return fault;
}

Fault dp_sum_missing() {
  Fault fault{.id = "dp_sum_missing", .fault_class = 'A', .subjects = {"ddp", "autotp"}};
  fault.summary = "The data-parallel wrapper was never applied; every replica trained on its own gradient.";
  fault.source = "ray_train_tensor_parallel verify_fsdp.py";
  fault.smallest_case = [] { return fault_case("qwen2", "ddp", 1, 3); };
  fault.hooks.collective = [](const Case&) {
    return skip_segments(
        [](const CallInfo& info, const Segment*) { return info.purpose == Purpose::kGradReduce && info.axis == Axis::kDp; });
  };
  fault.expected = {Stage::kParameterGrad, "", any_rank(3), "rank-local over dp"};
  return fault;
}

Fault kv_replica_grad_partial() {
  Fault fault{.id = "kv_replica_grad_partial", .fault_class = 'A', .subjects = {"autotp"}};
  fault.summary =
      "A replicated weight sat between split regions; each tp rank had a partial gradient and the copies parted at the first step.";
  fault.source = "torchtitan #2387, #2416";
  fault.smallest_case = copied_kv_heads_case;
  fault.hooks.collective = [](const Case&) {
    return skip_segments(
        [](const CallInfo& info, const Segment* segment) { return is_gradient_of(info, segment, Axis::kTp, ParamClass::kKvReplica); });
  };
  fault.expected = {Stage::kParameterGrad, "model.layers.0.self_attn.k_proj.weight", any_rank(4),
                    "rank-local partial over the tp ranks that share"};
  return fault;
}

Fault bucket_sized_param_not_reduced() {
  Fault fault{.id = "bucket_sized_param_not_reduced", .fault_class = 'A', .subjects = {"ddp", "autotp"}};
  fault.summary = "A gradient exactly as large as the bucket took a side path that skipped the reduction.";
  fault.source = "DeepSpeed #4321, #3832";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "ddp", 1, 3);
    item.settings.bucket_bytes = item.config.hidden_size * item.config.hidden_size * 4;  // q_proj.weight in fp32
    return item;
  };
  fault.hooks.collective = [](const Case& item) {
    const auto bucket = item.settings.bucket_bytes / static_cast<std::int64_t>(size_of(item.dtype));
    return skip_segments([bucket](const CallInfo& info, const Segment* segment) {
      return is_gradient_of(info, segment, Axis::kDp, ParamClass::kMatrix) && segment->count == bucket;
    });
  };
  fault.expected = {Stage::kParameterGrad, "model.layers.0.self_attn.q_proj.weight", any_rank(3), "rank-local over dp"};
  return fault;
}

}  // namespace

void add_reduction_faults(Faults& faults) {
  for (Fault (*make)() : {mlp_input_grad_partial, dp_sum_missing, kv_replica_grad_partial, bucket_sized_param_not_reduced}) {
    faults.push_back(make());
  }
}

}  // namespace isoshard
