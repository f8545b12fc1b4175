// SPDX-License-Identifier: Apache-2.0
// The record of data parallelism.
#include "subjects/parallel/ddp/ddp_arithmetic.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/parallel/ddp/gradient_reducer.h"

namespace isoshard {
Shape held_shape(const Arithmetic& arithmetic, const ParameterSpec& spec) {
  Shape shape = spec.shape;
  const auto cut = arithmetic.cuts.find(spec.name);
  if (cut == arithmetic.cuts.end()) return shape;
  std::int64_t& size = shape[static_cast<std::size_t>(cut->second.dim)];
  size = 0;
  for (const Range& range : cut->second.by_rank.at(0)) size += range.count;
  size = std::max(size, cut->second.padded_size);
  return shape;
}

void add_data_parallelism(Arithmetic& arithmetic, std::span<const ParameterSpec> specs,
                          const ArithmeticInputs& inputs) {
  arithmetic.dp = inputs.dp;
  arithmetic.tp = inputs.tp;
  arithmetic.dtype = inputs.dtype;
  arithmetic.master_dtype = inputs.master_dtype;
  if (inputs.autocast.has_value()) arithmetic.products = LowPrecisionProducts{*inputs.autocast};
  for (ReductionPoint* point : {&arithmetic.row_output, &arithmetic.column_input_gradient,
                                &arithmetic.parameter_gradient, &arithmetic.holder_gradient,
                                &arithmetic.token_count, &arithmetic.loss, &arithmetic.clip_norm}) {
    point->order = inputs.order;
  }
  arithmetic.parameter_gradient.reduction = Reduction::kAvg;
  arithmetic.loss.reduction = Reduction::kAvg;

  // Only sizes matter here: one element stands for all.
  const at::Tensor element =
      at::empty({1}, at::TensorOptions().dtype(scalar_type_of(inputs.dtype)));
  std::vector<ReducedParameter> reduced;
  for (const ParameterSpec& spec : specs) {
    const at::Tensor sized = element.expand(numel_of(held_shape(arithmetic, spec)));
    reduced.push_back({spec.name, spec.param_class, sized});
  }
  for (const std::vector<std::size_t>& bucket : bucket_assignment(reduced, inputs.bucket_bytes)) {
    std::vector<std::string>& names = arithmetic.gradient_buckets.emplace_back();
    for (const std::size_t i : bucket) names.push_back(specs[i].name);
  }
}

Arithmetic ddp_arithmetic(const Model& model, const ArithmeticInputs& inputs) {
  if (inputs.tp != 1)
    throw UsageError(fmt::format(
        "ddp holds whole replicas; a tp degree of {} needs the subject autotp", inputs.tp));
  if (inputs.make_vocab_size_divisible_by != 0) {
    throw UsageError(fmt::format(
        "ddp holds whole replicas; a vocabulary in multiples of {} needs the subject autotp",
        inputs.make_vocab_size_divisible_by));
  }
  Arithmetic arithmetic;
  add_data_parallelism(arithmetic, model.parameters(), inputs);
  if (inputs.dp > 1)
    arithmetic.rebuilt_buckets =
        RebuiltBuckets{std::min(kFirstBucketBytes, inputs.bucket_bytes), inputs.bucket_bytes};
  return arithmetic;
}

}  // namespace isoshard
