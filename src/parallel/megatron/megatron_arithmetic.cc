// SPDX-License-Identifier: Apache-2.0
// The record of megatron: that of autotp, and what differs.
#include "parallel/megatron/megatron_arithmetic.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "parallel/ddp/ddp_arithmetic.h"
#include "parallel/megatron/gradient_buffer.h"
#include "parallel/tensor/autotp_arithmetic.h"

namespace isoshard {
namespace {

// Whole on every tp rank and used token by token: with a cut sequence each rank has a summand of the gradient.
void cut_sequence(Arithmetic& arithmetic, const std::vector<ParameterSpec>& specs) {
  arithmetic.is_sequence_cut = true;
  std::vector<std::string> used_by_token;
  for (const ParameterSpec& spec : specs) {
    const ParamClass c = spec.param_class;
    if (c == ParamClass::kNorm || c == ParamClass::kRowBias || c == ParamClass::kPosition) used_by_token.push_back(spec.name);
  }
  if (!used_by_token.empty()) arithmetic.holder_sums.push_back(std::move(used_by_token));
}

void lay_out_gradients(Arithmetic& arithmetic, const std::vector<ParameterSpec>& specs, const ArithmeticInputs& inputs) {
  const Dtype dtype = main_gradient_dtype(inputs.dtype);
  arithmetic.accumulation_dtype = dtype;
  arithmetic.adds_to_zeros = true;
  arithmetic.gradient_buckets.clear();
  std::vector<std::int64_t> numels;
  for (const ParameterSpec& spec : specs) numels.push_back(numel_of(held_shape(arithmetic, spec)));
  const std::int64_t bucket_numel = std::max<std::int64_t>(1, inputs.bucket_bytes / static_cast<std::int64_t>(size_of(dtype)));
  for (const BufferBucket& bucket : buffer_buckets(numels, bucket_numel, inputs.dp, inputs.distributed_optimizer)) {
    std::vector<std::string>& names = arithmetic.gradient_buckets.emplace_back();
    BucketPlaces& places = arithmetic.bucket_places.emplace_back();
    places.numel = bucket.numel;
    for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
      const std::size_t parameter = bucket.parameters[i];
      const std::string& name = specs[parameter].name;
      names.push_back(name);
      places.runs.push_back({{0, bucket.begins[i], numels[parameter]}});
      if (!inputs.distributed_optimizer || inputs.dp == 1) continue;
      for (int rank = 0; rank < inputs.dp; ++rank) {
        const OwnedRun run = owned_run(bucket, bucket.begins[i], numels[parameter], inputs.dp, rank);
        arithmetic.stepped_runs[name].push_back({run.begin, run.count});
      }
    }
  }
}

}  // namespace

Arithmetic megatron_arithmetic(const Model& model, const ArithmeticInputs& inputs) {
  ArithmeticInputs tensor_parallel = inputs;
  tensor_parallel.vocab_multiple = std::max<std::int64_t>(1, inputs.vocab_multiple);
  tensor_parallel.zero_stage = 0;
  Arithmetic arithmetic = autotp_arithmetic(model, tensor_parallel);
  const std::vector<ParameterSpec> specs = model.parameters();
  if (inputs.sequence_parallel && inputs.tp > 1) cut_sequence(arithmetic, specs);
  lay_out_gradients(arithmetic, specs, inputs);
  return arithmetic;
}

}  // namespace isoshard
