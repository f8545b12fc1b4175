// SPDX-License-Identifier: Apache-2.0
// One-ulp steps on the bits of floats.
#include "suite/reference/perturbed_weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/comm/tensor.h"

namespace isoshard {
namespace {

// The next value of the float that `bits` encode (sign, then magnitude), towards larger magnitude
// or smaller. No branch, for vector code.
template <class Bits>
Bits stepped(Bits bits, bool up, Bits infinity) {
  constexpr Bits kSign = Bits(1) << (8 * sizeof(Bits) - 1);
  const Bits magnitude = bits & static_cast<Bits>(~kSign);
  const Bits from_zero = up ? Bits(1) : static_cast<Bits>(kSign | 1);
  // Stepping a magnitude by a random sign is stepping the value by a random sign. The largest
  // finite value only goes down.
  const Bits next = static_cast<Bits>(up && magnitude + 1 < infinity ? bits + 1 : bits - 1);
  return magnitude >= infinity ? bits : magnitude == 0 ? from_zero : next;
}

// Calls f(position in the box, flat index in the whole tensor, count) for each contiguous run of
// the box.
template <class Function>
void for_each_run(const Shape& shape, const Shape& offset, const Shape& size, Function&& f) {
  const std::int64_t run = size.empty() ? 1 : size.back();
  const std::int64_t total = numel_of(size);
  if (total == 0) return;
  for (std::int64_t position = 0; position < total; position += run) {
    std::int64_t rest = position;
    std::int64_t index = 0;
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      index += (offset[d] + rest % size[d]) * stride;
      rest /= size[d];
      stride *= shape[d];
    }
    f(position, index, run);
  }
}

template <class Bits>
void perturb(at::Tensor& tensor, const RandomStream& random, const ParameterSpec& spec,
             const Shape& offset, Bits infinity) {
  auto* const bits = static_cast<Bits*>(tensor.mutable_data_ptr());
  for_each_run(spec.shape, offset, tensor.sizes().vec(),
               [&](std::int64_t position, std::int64_t index, std::int64_t count) {
                 // 64 elements share a word.
                 for (std::int64_t i = 0; i < count;) {
                   const auto element = static_cast<std::uint64_t>(index + i);
                   const std::uint64_t word = random.bits(element / 64) >> (element % 64);
                   const std::int64_t shared = std::min<std::int64_t>(
                       count - i, 64 - static_cast<std::int64_t>(element % 64));
                   Bits* const run = bits + position + i;
                   for (std::int64_t j = 0; j < shared; ++j)
                     run[j] = stepped<Bits>(run[j], ((word >> j) & 1) != 0, infinity);
                   i += shared;
                 }
               });
}

// Rounded to `dtype` and moved.
at::Tensor stepped_in(Dtype dtype, const at::Tensor& weights, const RandomStream& random,
                      const ParameterSpec& spec, const Shape& offset) {
  at::Tensor result = weights.to(scalar_type_of(dtype), /*non_blocking=*/false, /*copy=*/true);
  if (dtype == Dtype::kFloat64)
    perturb<std::uint64_t>(result, random, spec, offset, 0x7FF0000000000000U);
  if (dtype == Dtype::kFloat32) perturb<std::uint32_t>(result, random, spec, offset, 0x7F800000U);
  if (dtype == Dtype::kBFloat16) perturb<std::uint16_t>(result, random, spec, offset, 0x7F80U);
  if (dtype == Dtype::kFloat16) perturb<std::uint16_t>(result, random, spec, offset, 0x7C00U);
  return result;
}

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
  const RandomStream random(seed_, "perturb." + spec.name);
  const at::Tensor before = inner_->read_as(scalar_type_of(dtype_), spec, offset, size);
  if (!autocast_.has_value() || !is_rounded_by_autocast(spec.param_class))
    return stepped_in(dtype_, before, random, spec, offset);
  const at::Tensor rounded = before.to(scalar_type_of(*autocast_));
  return before + (stepped_in(*autocast_, rounded, random, spec, offset).to(before.scalar_type()) -
                   rounded.to(before.scalar_type()));
}

}  // namespace isoshard
