// SPDX-License-Identifier: Apache-2.0
// The numerics of data parallelism.
#include "subjects/parallel/ddp/ddp_numerics.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/parallel/ddp/gradient_reducer.h"
#include "subjects/parallel/frozen_weights.h"
#include "subjects/parallel/grad_average.h"

namespace isoshard {

Shape held_shape(const TensorNumerics& tensor, const ParameterSpec& spec) {
  Shape shape = spec.shape;
  const auto cut = tensor.cuts.find(spec.name);
  if (cut == tensor.cuts.end()) return shape;
  std::int64_t& size = shape[static_cast<std::size_t>(cut->second.dim)];
  size = 0;
  for (const Range& range : cut->second.by_rank.at(0)) size += range.count;
  size = std::max(size, cut->second.padded_size);
  return shape;
}

void add_data_parallelism(NumericsSpec& numerics, std::span<const ParameterSpec> specs,
                          const NumericsInputs& inputs) {
  numerics.mesh = inputs.mesh;
  numerics.precision.dtype = inputs.dtype;
  numerics.precision.master_dtype = inputs.settings.master_dtype;
  if (inputs.settings.autocast.has_value())
    numerics.precision.products = LowPrecisionProducts{*inputs.settings.autocast};
  for (ReductionPoint* point :
       {&numerics.tensor.row_output, &numerics.tensor.column_input_gradient,
        &numerics.data.parameter_gradient, &numerics.tensor.holder_gradient,
        &numerics.data.token_count, &numerics.data.loss, &numerics.norm.square_sums}) {
    point->order = inputs.order;
  }
  AveragedReduction(inputs.settings.grad_average, inputs.mesh.degree(Axis::kDp))
      .declare(numerics.data.parameter_gradient);
  if (inputs.settings.accumulate_dtype.has_value()) {
    numerics.data.accumulation.dtype = inputs.settings.accumulate_dtype;
    numerics.data.parameter_gradient.dtype = inputs.dtype;
  }
  numerics.norm.is_torchs = inputs.settings.clip_norm == ClipNorm::kTorch;
  numerics.data.loss.reduction = Reduction::kAvg;

  // Only sizes matter here: one element stands for all.
  const at::Tensor element =
      at::empty({1}, at::TensorOptions().dtype(scalar_type_of(inputs.dtype)));
  std::vector<ReducedParameter> reduced;
  for (const ParameterSpec& spec : specs) {
    const at::Tensor sized = element.expand(numel_of(held_shape(numerics.tensor, spec)));
    reduced.push_back({spec.name, spec.param_class, sized});
  }
  for (const std::vector<std::size_t>& bucket :
       bucket_assignment(reduced, inputs.settings.bucket_bytes)) {
    std::vector<std::string>& names = numerics.data.buckets.parameters.emplace_back();
    for (const std::size_t i : bucket) names.push_back(specs[i].name);
  }
}

NumericsSpec ddp_numerics(const Model& model, const NumericsInputs& inputs) {
  const int tp = inputs.mesh.degree(Axis::kTp);
  if (tp != 1)
    throw UsageError(
        fmt::format("ddp holds whole replicas; a tp degree of {} needs the subject autotp", tp));
  if (inputs.settings.make_vocab_size_divisible_by != 0) {
    throw UsageError(fmt::format(
        "ddp holds whole replicas; a vocabulary in multiples of {} needs the subject autotp",
        inputs.settings.make_vocab_size_divisible_by));
  }
  NumericsSpec numerics;
  add_data_parallelism(numerics, trained_parameters(model, inputs.settings), inputs);
  if (inputs.mesh.degree(Axis::kDp) > 1)
    numerics.data.buckets.rebuilt = RebuiltBuckets{
        std::min(kFirstBucketBytes, inputs.settings.bucket_bytes), inputs.settings.bucket_bytes};
  return numerics;
}

}  // namespace isoshard
