// SPDX-License-Identifier: Apache-2.0
// One-ulp steps on the bits of floats.
#include "core/tensor/moved_by_an_ulp.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>
#include <vector>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/tensor/convert.h"

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
void for_each_run(at::IntArrayRef shape, at::IntArrayRef offset, at::IntArrayRef size,
                  Function&& f) {
  const std::int64_t run = size.empty() ? 1 : size.back();
  const std::int64_t total = c10::multiply_integers(size);
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
void move_by_an_ulp(const at::Tensor& tensor, const RandomStream& random, at::IntArrayRef shape,
                    at::IntArrayRef offset, Bits infinity) {
  auto* const bits = static_cast<Bits*>(tensor.mutable_data_ptr());
  for_each_run(shape, offset, tensor.sizes(),
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

void require_box(at::IntArrayRef size, at::IntArrayRef shape, at::IntArrayRef offset) {
  bool is_inside = size.size() == shape.size() && size.size() == offset.size();
  for (std::size_t d = 0; is_inside && d < size.size(); ++d)
    is_inside = offset[d] >= 0 && offset[d] + size[d] <= shape[d];
  if (is_inside) return;
  throw ShapeError(fmt::format("a box must lie in its tensor, got [{}] at [{}] of [{}]",
                               fmt::join(size, ", "), fmt::join(offset, ", "),
                               fmt::join(shape, ", ")));
}

}  // namespace

at::Tensor moved_by_an_ulp(const at::Tensor& tensor, std::uint64_t seed, std::string_view name) {
  const std::vector<std::int64_t> begin(static_cast<std::size_t>(tensor.dim()), 0);
  return moved_box_by_an_ulp(tensor, tensor.sizes(), begin, seed, name);
}

at::Tensor moved_box_by_an_ulp(const at::Tensor& box, at::IntArrayRef shape, at::IntArrayRef offset,
                               std::uint64_t seed, std::string_view name) {
  const Dtype dtype = dtype_of(box);
  if (!is_floating(dtype) || !box.is_cpu())
    throw ShapeError(fmt::format(
        "what is moved by one ulp must be a tensor of fp64, fp32, bf16 or fp16 in CPU memory, got "
        "{} on {}",
        name_of(dtype), box.device().str()));
  require_box(box.sizes(), shape, offset);
  const RandomStream random(seed, "perturb." + std::string(name));
  const at::Tensor moved = box.detach().clone(at::MemoryFormat::Contiguous);
  switch (dtype) {
    case Dtype::kFloat64:
      move_by_an_ulp<std::uint64_t>(moved, random, shape, offset, 0x7FF0000000000000U);
      break;
    case Dtype::kFloat32:
      move_by_an_ulp<std::uint32_t>(moved, random, shape, offset, 0x7F800000U);
      break;
    case Dtype::kBFloat16:
      move_by_an_ulp<std::uint16_t>(moved, random, shape, offset, 0x7F80U);
      break;
    default:
      move_by_an_ulp<std::uint16_t>(moved, random, shape, offset, 0x7C00U);
  }
  return moved;
}

}  // namespace isoshard
