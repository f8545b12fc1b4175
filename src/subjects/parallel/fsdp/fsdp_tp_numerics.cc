// SPDX-License-Identifier: Apache-2.0
// The numerics of fsdp_tp.
#include "subjects/parallel/fsdp/fsdp_tp_numerics.h"

#include <map>
#include <string>

#include "core/observe/layer_name.h"
#include "subjects/parallel/ddp/ddp_numerics.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/parallel/tensor/autotp_numerics.h"

namespace isoshard {

NumericsSpec fsdp_tp_numerics(const Model& model, const NumericsInputs& inputs) {
  const int dp = inputs.mesh.degree(Axis::kDp);
  NumericsSpec numerics = autotp_numerics(model, inputs);
  std::map<std::string, std::vector<std::string>, std::less<>> groups;
  const IsFrozen is_frozen = frozen_by(inputs.settings.freeze);
  for (const ParameterSpec& spec : model.parameters()) {
    if (!is_frozen(spec.name)) groups[std::string(layer_of(spec.name))].push_back(spec.name);
    if (dp == 1) continue;
    for (const Range& rows : dim0_shards(held_shape(numerics.tensor, spec), dp).elements)
      numerics.data.sharding.stepped_runs[spec.name].push_back({rows});
  }
  numerics.data.buckets.parameters.clear();
  for (auto& [module, names] : groups) numerics.data.buckets.parameters.push_back(std::move(names));
  numerics.data.parameter_gradient.dtype = inputs.settings.reduce_dtype.value_or(inputs.dtype);
  numerics.data.accumulation.dtype = inputs.settings.master_dtype;
  numerics.precision.logits_dtype = inputs.settings.output_dtype;
  numerics.data.accumulation.reduces_every_micro_batch = true;
  numerics.data.sharding.reduces_to_owner = dp > 1;
  numerics.data.sharding.keeps_runs = dp > 1;
  return numerics;
}

}  // namespace isoshard
