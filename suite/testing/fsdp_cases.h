// SPDX-License-Identifier: Apache-2.0
/// Cases that the suites of fsdp_tp share.
#pragma once
#include "suite/testing/step_cases.h"

namespace isoshard {

inline Case fsdp_case(const Degrees& degrees, Dtype dtype = Dtype::kFloat32,
                      std::string_view model_type = "qwen2") {
  return step_case("fsdp_tp", degrees, dtype, model_type);
}

/// bf16 parameters and gradients, fp32 masters and optimizer state; gradients are reduced in bf16
/// unless told otherwise.
inline Case with_masters(Case item, std::optional<Dtype> reduce = {}) {
  item.dtype = Dtype::kBFloat16;
  item.settings.master_dtype = Dtype::kFloat32;
  item.settings.reduce_dtype = reduce;
  return item;
}

inline Case with_output(Case item, Dtype dtype) {
  item.settings.output_dtype = dtype;
  return item;
}

inline Case reduced_in(Case item, Dtype dtype) {
  item.settings.reduce_dtype = dtype;
  return item;
}

inline Case with_adamw(Case item) {
  item.settings.optimizer = OptimizerSettings{};
  item.settings.optimizer.weight_decay = 0.1;
  item.steps = 2;
  return item;
}

inline Case accumulated(Case item) {
  item.micro_batches = 3;
  item.data.unequal_labels = true;
  return item;
}

}  // namespace isoshard
