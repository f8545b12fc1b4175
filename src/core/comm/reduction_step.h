// SPDX-License-Identifier: Apache-2.0
/// One step of a reduction on one element, as code of the CPU and kernels of CUDA both call it:
/// docs/internals/reduction.md's rounding, combining and storing, in one place.
#pragma once
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "core/base/float_bits.h"
#include "core/comm/communicator.h"

namespace isoshard::reduction {

// One storage type and one accumulator type per dtype. bf16 and fp16 are told apart by these tags.
struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};
struct Bool {
  std::uint8_t byte;
};

template <class T>
[[gnu::always_inline]] constexpr auto widen(T value) noexcept {
  if constexpr (std::same_as<T, Bf16>) {
    return bf16_to_float(value.bits);
  } else if constexpr (std::same_as<T, Fp16>) {
    return fp16_to_float(value.bits);
  } else if constexpr (std::same_as<T, Bool>) {
    return static_cast<std::uint8_t>(value.byte != 0);
  } else {
    return value;
  }
}

template <class T>
using Accumulator = decltype(widen(T{}));

template <class T>
[[gnu::always_inline]] constexpr T narrow(Accumulator<T> value) noexcept {
  if constexpr (std::same_as<T, Bf16>) {
    return {float_to_bf16(value)};
  } else if constexpr (std::same_as<T, Fp16>) {
    return {float_to_fp16(value)};
  } else if constexpr (std::same_as<T, Bool>) {
    return {value};
  } else {
    return value;
  }
}

template <class T, Reduction kReduction>
[[gnu::always_inline]] constexpr Accumulator<T> combine(Accumulator<T> sum,
                                                        Accumulator<T> value) noexcept {
  using A = Accumulator<T>;
  if constexpr (kReduction == Reduction::kMin) {
    return (value < sum || value != value) ? value : sum;
  } else if constexpr (kReduction == Reduction::kMax) {
    return (value > sum || value != value) ? value : sum;
  } else if constexpr (std::same_as<T, Bool>) {
    return static_cast<A>(sum | value);
  } else if constexpr (std::integral<A>) {
    using U = std::make_unsigned_t<A>;  // unsigned: wrapping is defined
    return static_cast<A>(static_cast<U>(static_cast<U>(sum) + static_cast<U>(value)));
  } else {
    return sum + value;
  }
}

/// What is stored of an accumulator; avg divides by the number of ranks, all else leaves it.
template <class T, Reduction kReduction>
[[gnu::always_inline]] constexpr T finish(Accumulator<T> value, int num_ranks) noexcept {
  using A = Accumulator<T>;
  if constexpr (kReduction == Reduction::kAvg) {
    return narrow<T>(static_cast<A>(value / static_cast<A>(num_ranks)));
  } else {
    return narrow<T>(value);
  }
}

}  // namespace isoshard::reduction
