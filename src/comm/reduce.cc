// SPDX-License-Identifier: Apache-2.0
/// The ordered reduction, block by block through an accumulator that stays in the first-level cache.
#include "comm/reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <type_traits>

#include "base/error.h"
#include "base/float_bits.h"

// The loops are compiled once per instruction set and chosen at load time. They hold only adds, divisions, comparisons and
// integer operations, never a fused multiply-add or a reassociated sum, so all versions give the same bits. Sanitizers
// cannot run the resolvers that choose (they run before the sanitizer's own start), and other compilers may lack them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define ISOSHARD_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define ISOSHARD_CLONES
#endif

namespace isoshard {
namespace {

constexpr std::int64_t kBlock = 1024;  ///< elements; an fp64 accumulator of one block is 8 KiB

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
[[gnu::always_inline]] inline auto widen(T value) noexcept {
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
[[gnu::always_inline]] inline T narrow(Accumulator<T> value) noexcept {
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
[[gnu::always_inline]] inline Accumulator<T> combine(Accumulator<T> sum, Accumulator<T> value) noexcept {
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

// `size` <= kBlock. The accumulator is a local array, so that output may be one of the sources.
template <class T, Reduction kReduction>
[[gnu::always_inline]] inline void reduce_block(const std::byte* const* sources, std::size_t num_sources, std::int64_t begin,
                                                std::int64_t size, std::byte* output) noexcept {
  using A = Accumulator<T>;
  alignas(64) std::array<A, kBlock> sum;  // NOLINT: filled by the first source
  A* const accumulator = sum.data();
  const T* const first = reinterpret_cast<const T*>(sources[0]) + begin;
  if (num_sources == 1) {
    for (std::int64_t i = 0; i < size; ++i) accumulator[i] = widen(first[i]);
  } else {
    const T* const second = reinterpret_cast<const T*>(sources[1]) + begin;
    for (std::int64_t i = 0; i < size; ++i) accumulator[i] = combine<T, kReduction>(widen(first[i]), widen(second[i]));
  }
  for (std::size_t s = 2; s < num_sources; ++s) {
    const T* const next = reinterpret_cast<const T*>(sources[s]) + begin;
    for (std::int64_t i = 0; i < size; ++i) accumulator[i] = combine<T, kReduction>(accumulator[i], widen(next[i]));
  }
  T* const out = reinterpret_cast<T*>(output) + begin;
  if constexpr (kReduction == Reduction::kAvg) {
    const A divisor = static_cast<A>(num_sources);
    for (std::int64_t i = 0; i < size; ++i) out[i] = narrow<T>(static_cast<A>(accumulator[i] / divisor));
  } else {
    for (std::int64_t i = 0; i < size; ++i) out[i] = narrow<T>(accumulator[i]);
  }
}

template <class T, Reduction kReduction>
[[gnu::always_inline]] inline void reduce_all(const std::byte* const* sources, std::size_t num_sources, std::byte* output,
                                              std::int64_t count) noexcept {
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    reduce_block<T, kReduction>(sources, num_sources, begin, std::min(kBlock, count - begin), output);
  }
}

// Plain functions, because clones of templates collide between instruction sets. One line per dtype and reduction.
using Kernel = void (*)(const std::byte* const* sources, std::size_t num_sources, std::byte* output, std::int64_t count);
#define ISOSHARD_KERNEL(name, type, reduction)                                                                                 \
  ISOSHARD_CLONES void name(const std::byte* const* sources, std::size_t num_sources, std::byte* output, std::int64_t count) { \
    reduce_all<type, Reduction::reduction>(sources, num_sources, output, count);                                               \
  }
#define ISOSHARD_KERNELS(name, type)      \
  ISOSHARD_KERNEL(name##_sum, type, kSum) \
  ISOSHARD_KERNEL(name##_avg, type, kAvg) \
  ISOSHARD_KERNEL(name##_min, type, kMin) \
  ISOSHARD_KERNEL(name##_max, type, kMax)

ISOSHARD_KERNELS(float64, double)
ISOSHARD_KERNELS(float32, float)
ISOSHARD_KERNELS(bfloat16, Bf16)
ISOSHARD_KERNELS(float16, Fp16)
ISOSHARD_KERNELS(int64, std::int64_t)
ISOSHARD_KERNELS(int32, std::int32_t)
ISOSHARD_KERNELS(int16, std::int16_t)
ISOSHARD_KERNELS(int8, std::int8_t)
ISOSHARD_KERNELS(uint8, std::uint8_t)
ISOSHARD_KERNELS(boolean, Bool)

#define ISOSHARD_ROW(name) \
  { name##_sum, name##_avg, name##_min, name##_max }
constexpr std::array<std::array<Kernel, 4>, 10> kKernels = {
    {ISOSHARD_ROW(float64), ISOSHARD_ROW(float32), ISOSHARD_ROW(bfloat16), ISOSHARD_ROW(float16), ISOSHARD_ROW(int64), ISOSHARD_ROW(int32),
     ISOSHARD_ROW(int16), ISOSHARD_ROW(int8), ISOSHARD_ROW(uint8), ISOSHARD_ROW(boolean)}};
static_assert(static_cast<int>(Dtype::kBool) == 9 && static_cast<int>(Reduction::kMax) == 3);

}  // namespace

void check_reducible(Reduction reduction, Dtype dtype) {
  if (reduction == Reduction::kAvg && dtype == Dtype::kBool) {
    throw ShapeError("avg of bool has no meaning; reduce with sum (any), max (any) or min (all), or convert to an integer first");
  }
}

void reduce_ordered(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources, std::byte* output, std::int64_t count) {
  check_reducible(reduction, dtype);
  if (sources.empty()) throw ShapeError(fmt::format("a reduction of {} elements needs at least one source", count));
  kKernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(reduction)](sources.data(), sources.size(), output, count);
}

}  // namespace isoshard
