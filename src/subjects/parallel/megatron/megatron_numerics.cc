// SPDX-License-Identifier: Apache-2.0
// The numerics of megatron: those of autotp, and what differs.
#include "subjects/parallel/megatron/megatron_numerics.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "subjects/parallel/ddp/ddp_numerics.h"
#include "subjects/parallel/megatron/fused_layers.h"
#include "subjects/parallel/megatron/gradient_buffer.h"
#include "subjects/parallel/megatron/megatron_plan.h"
#include "subjects/parallel/tensor/autotp_numerics.h"

namespace isoshard {
namespace {

// One product for each group; the others are as they were.
void fuse_products(NumericsSpec& numerics, const std::vector<FusedLayers>& groups) {
  for (const FusedLayers& group : groups) {
    for (SharedInput& shared : numerics.tensor.shared_inputs) {
      if (shared.modules == group.modules) shared.fused = FusedProduct{group.turns, group.rows};
    }
  }
}

void lay_out_gradients(NumericsSpec& numerics, const std::vector<ParameterSpec>& specs,
                       const std::vector<FusedLayers>& groups, const NumericsInputs& inputs) {
  const int dp = inputs.mesh.degree(Axis::kDp);
  const Dtype dtype = main_gradient_dtype(inputs.dtype);
  numerics.data.accumulation.dtype = dtype;
  numerics.data.accumulation.adds_to_zeros = true;
  numerics.data.buckets.parameters.clear();
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const ParameterSpec& spec : specs) {
    names.push_back(spec.name);
    shapes.push_back(held_shape(numerics.tensor, spec));
  }
  std::vector<StoredParameter> stored = stored_parameters(names, shapes, groups);
  const IsFrozen is_frozen = frozen_by(inputs.settings.freeze);
  std::erase_if(stored, [&](const StoredParameter& unit) {
    return is_frozen_unit(unit, [&](std::size_t i) { return is_frozen(names[i]); });
  });
  std::vector<std::int64_t> numels;
  for (const StoredParameter& parameter : stored) numels.push_back(numel_of(parameter.shape));
  const std::int64_t bucket_numel = std::max<std::int64_t>(
      1, inputs.settings.bucket_bytes / static_cast<std::int64_t>(size_of(dtype)));
  const bool is_cut = inputs.settings.distributed_optimizer && dp > 1;
  for (const BufferBucket& bucket :
       buffer_buckets(numels, bucket_numel, dp, inputs.settings.distributed_optimizer)) {
    std::vector<std::string>& in_bucket = numerics.data.buckets.parameters.emplace_back();
    BucketPlaces& places = numerics.data.buckets.places.emplace_back();
    places.numel = bucket.numel;
    for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
      const StoredParameter& unit = stored[bucket.parameters[i]];
      for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
        const std::string& name = names[unit.parameters[p]];
        in_bucket.push_back(name);
        std::vector<PlacedRun>& runs = places.runs.emplace_back();
        for (const StoredRun& run : unit.runs[p])
          runs.push_back({run.begin, bucket.begins[i] + run.stored, run.count});
        for (int rank = 0; is_cut && rank < dp; ++rank) {
          numerics.data.sharding.stepped_runs[name].push_back(
              owned_runs(bucket, bucket.begins[i], unit.runs[p], dp, rank));
        }
      }
    }
  }
}

}  // namespace

NumericsSpec megatron_numerics(const Model& model, const NumericsInputs& inputs) {
  NumericsInputs tensor_parallel = inputs;
  tensor_parallel.settings.make_vocab_size_divisible_by =
      std::max<std::int64_t>(1, inputs.settings.make_vocab_size_divisible_by);
  tensor_parallel.settings.zero_stage = 0;
  const int tp = inputs.mesh.degree(Axis::kTp);
  const ShardPlan plan = megatron_plan(model, tp, inputs.settings.make_vocab_size_divisible_by);
  NumericsSpec numerics = autotp_numerics(model, tensor_parallel, plan);
  const std::vector<ParameterSpec> specs = model.parameters();
  const std::vector<FusedLayers> groups = fused_layers(model, plan);
  fuse_products(numerics, groups);
  lay_out_gradients(numerics, specs, groups, inputs);
  return numerics;
}

}  // namespace isoshard
