// SPDX-License-Identifier: Apache-2.0
/// Legal differences of a correct implementation: none may alarm.
#include <ATen/ATen.h>

#include "conformance/detection/catalogue.h"
#include "conformance/detection/twins.h"

namespace isoshard {
namespace {

Fault sum_order() {
  Fault miss{.id = "sum_order", .subjects = {"ddp", "autotp"}};
  miss.summary = "Gradients and activations are added around a ring instead of in rank order.";
  miss.smallest_case = [] { return fault_case("qwen2", "autotp", 3, 2); };
  miss.hooks.order = [](const Case&) { return ReductionOrder::kRing; };
  return miss;
}

Fault bf16_hops() {
  Fault miss{.id = "bf16_hops", .subjects = {"ddp", "autotp"}};
  miss.summary = "bf16 is rounded at every hop of a ring, not once.";
  miss.smallest_case = [] {
    Case item = fault_case("qwen2", "autotp", 3, 2);
    item.dtype = Dtype::kBFloat16;
    return item;
  };
  miss.hooks.order = [](const Case&) { return ReductionOrder::kRing; };
  return miss;
}

Fault bucketing() {
  Fault miss{.id = "bucketing", .subjects = {"ddp", "autotp"}};
  miss.summary = "One bucket per few tensors instead of one flat buffer.";
  miss.smallest_case = [] { return fault_case("qwen2", "ddp", 1, 3); };
  miss.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.bucket_bytes = 4096;
    probe.fired();
  };
  return miss;
}

Fault signed_zero() {
  Fault miss{.id = "signed_zero", .subjects = {"ddp", "autotp"}};
  miss.summary = "Zeros have the other sign.";
  miss.smallest_case = [] {
    Case item = fault_case("qwen2", "autotp", 2, 3);
    item.data.unequal_labels = true;  // masked positions have gradients of zero
    return item;
  };
  miss.hooks.tap = [](const Case&, int) -> TapMutation {
    return [](const Site&, at::Tensor value) {
      const at::Tensor zero = value.eq(0);
      return zero.any().item<bool>() ? at::where(zero, -value, value) : value;
    };
  };
  return miss;
}

}  // namespace

void add_near_misses(Faults& faults) {
  for (Fault (*make)() : {sum_order, bf16_hops, bucketing, signed_zero}) faults.push_back(make());
}

}  // namespace isoshard
