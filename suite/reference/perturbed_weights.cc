// SPDX-License-Identifier: Apache-2.0
// Which dtype a weight moves in.
#include "suite/reference/perturbed_weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <utility>

#include "core/base/error.h"
#include "core/tensor/convert.h"
#include "core/tensor/moved_by_an_ulp.h"

namespace isoshard {
namespace {

// Whether autocast rounds the parameter before it is used.
bool is_rounded_by_autocast(ParamClass param_class) {
  switch (param_class) {
    case ParamClass::kNorm:
    case ParamClass::kQkNorm:
    case ParamClass::kEmbedding:
    case ParamClass::kPosition:
      return false;
    default:
      return true;
  }
}

}  // namespace

PerturbedWeights::PerturbedWeights(std::shared_ptr<const WeightSource> inner, std::uint64_t seed,
                                   Dtype dtype, std::optional<Dtype> autocast)
    : inner_(std::move(inner)), seed_(seed), dtype_(dtype), autocast_(autocast) {
  for (const Dtype used : {dtype, autocast.value_or(dtype)}) {
    if (!is_floating(used))
      throw UsageError(fmt::format("weights are perturbed in fp64, fp32, bf16 or fp16, not in {}",
                                   name_of(used)));
  }
}

at::Tensor PerturbedWeights::read(const ParameterSpec& spec, const Shape& offset,
                                  const Shape& size) const {
  const auto moved = [&](const at::Tensor& box) {
    return moved_box_by_an_ulp(box, spec.shape, offset, seed_, spec.name);
  };
  const at::Tensor before = inner_->read_as(scalar_type_of(dtype_), spec, offset, size);
  if (!autocast_.has_value() || !is_rounded_by_autocast(spec.param_class)) return moved(before);
  const at::Tensor rounded = before.to(scalar_type_of(*autocast_));
  return before + (moved(rounded).to(before.scalar_type()) - rounded.to(before.scalar_type()));
}

}  // namespace isoshard
