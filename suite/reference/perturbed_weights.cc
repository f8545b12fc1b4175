// SPDX-License-Identifier: Apache-2.0
// One-ulp steps on the bits of floats.
#include "suite/reference/perturbed_weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/comm/tensor.h"

namespace isoshard {
namespace {

// The next value of the float that `bits` encode (sign, then magnitude), towards larger magnitude
// (`up` is all ones) or smaller (0). No branch, and one width, for vector code.
template <class Bits>
Bits stepped(Bits bits, Bits up, Bits infinity) {
  using Signed = std::make_signed_t<Bits>;
  constexpr Bits kSign = static_cast<Bits>(Bits(1) << (8 * sizeof(Bits) - 1));
  const Bits magnitude = bits & static_cast<Bits>(~kSign);
  const Bits from_zero = static_cast<Bits>((static_cast<Bits>(~up) & kSign) | 1);
  // Stepping a magnitude by a random sign is stepping the value by a random sign. The largest
  // finite value only goes down.
  const Bits largest = static_cast<Bits>(infinity - 1);
  const Bits goes_up = magnitude == largest ? Bits(0) : up;
  const Bits next = static_cast<Bits>(bits - 1 + (goes_up & 2));
  const Bits moved = magnitude == 0 ? from_zero : next;
  return static_cast<Signed>(magnitude) >= static_cast<Signed>(infinity) ? bits : moved;
}

constexpr std::int64_t kShared = 64;  ///< elements that share a word of random bits

// All ones where the bit of the element is set.
template <class Bits>
std::array<Bits, kShared> directions(std::uint64_t word) {
  constexpr std::size_t kLanes = std::min<std::size_t>(8 * sizeof(Bits), 16);
  std::array<Bits, kShared> up;
  for (std::size_t begin = 0; begin < up.size(); begin += kLanes) {
    const auto bits = static_cast<Bits>(word >> begin);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const bool is_set = (bits & static_cast<Bits>(Bits(1) << lane)) != 0;
      up[begin + lane] = is_set ? static_cast<Bits>(~Bits(0)) : Bits(0);
    }
  }
  return up;
}

// One by one at the ends of a run, and a whole word's elements at a time between.
template <class Bits>
void step_run(Bits* run, std::int64_t count, const Bits* up, Bits infinity) {
  if (count == kShared) {
    for (std::int64_t j = 0; j < kShared; ++j) run[j] = stepped<Bits>(run[j], up[j], infinity);
    return;
  }
  for (std::int64_t j = 0; j < count; ++j) run[j] = stepped<Bits>(run[j], up[j], infinity);
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
                 for (std::int64_t i = 0; i < count;) {
                   const std::int64_t element = index + i, place = element % kShared;
                   const std::int64_t here = std::min(count - i, kShared - place);
                   const std::array<Bits, kShared> up =
                       directions<Bits>(random.bits(static_cast<std::uint64_t>(element / kShared)));
                   step_run(bits + position + i, here, up.data() + place, infinity);
                   i += here;
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
