// SPDX-License-Identifier: Apache-2.0
// The record of fsdp_tp.
#include "subjects/parallel/fsdp/fsdp_tp_arithmetic.h"

#include <map>
#include <string>

#include "subjects/parallel/ddp/ddp_arithmetic.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/parallel/tensor/autotp_arithmetic.h"

namespace isoshard {

Arithmetic fsdp_tp_arithmetic(const Model& model, const ArithmeticInputs& inputs) {
  Arithmetic arithmetic = autotp_arithmetic(model, inputs);
  std::map<std::string, std::vector<std::string>, std::less<>> groups;
  for (const ParameterSpec& spec : model.parameters()) {
    groups[std::string(block_of(spec.name))].push_back(spec.name);
    if (inputs.dp == 1) continue;
    for (const Range& rows : dim0_shards(held_shape(arithmetic, spec), inputs.dp).elements)
      arithmetic.stepped_runs[spec.name].push_back({rows});
  }
  arithmetic.gradient_buckets.clear();
  for (auto& [module, names] : groups) arithmetic.gradient_buckets.push_back(std::move(names));
  arithmetic.parameter_gradient.dtype = inputs.reduce_dtype.value_or(inputs.dtype);
  arithmetic.accumulation_dtype = inputs.master_dtype;
  arithmetic.logits_dtype = inputs.output_dtype;
  arithmetic.reduces_every_micro_batch = true;
  arithmetic.reduces_to_owner = inputs.dp > 1;
  arithmetic.keeps_runs = inputs.dp > 1;
  return arithmetic;
}

}  // namespace isoshard
