// SPDX-License-Identifier: Apache-2.0
/// The reductions on raw memory, block by block through an accumulator that stays in the
/// first-level cache.
#include "core/comm/reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/base/error.h"
#include "core/comm/reduction_step.h"

// The loops are compiled once per instruction set and chosen at load time. They hold only adds,
// divisions, comparisons and integer operations, never a fused multiply-add or a reassociated sum,
// so all versions give the same bits. Sanitizers cannot run the resolvers that choose (they run
// before the sanitizer's own start), and other compilers may lack them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define ISOSHARD_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define ISOSHARD_CLONES
#endif

namespace isoshard {
namespace {

using reduction::Accumulator;
using reduction::Bf16;
using reduction::Bool;
using reduction::combine;
using reduction::finish;
using reduction::Fp16;
using reduction::widen;

constexpr std::int64_t kBlock = 1024;  ///< elements; an fp64 accumulator of one block is 8 KiB

// `size` <= kBlock. The accumulator is a local array, so that output may be one of the sources.
template <class T, Reduction kReduction>
[[gnu::always_inline]] inline void reduce_block(const std::byte* const* sources,
                                                std::size_t num_sources, int divisor,
                                                std::int64_t begin, std::int64_t size,
                                                std::byte* output) noexcept {
  using A = Accumulator<T>;
  alignas(64) std::array<A, kBlock> sum;  // NOLINT: filled by the first source
  A* const accumulator = sum.data();
  const T* const first = reinterpret_cast<const T*>(sources[0]) + begin;
  if (num_sources == 1) {
    for (std::int64_t i = 0; i < size; ++i) accumulator[i] = widen(first[i]);
  } else {
    const T* const second = reinterpret_cast<const T*>(sources[1]) + begin;
    for (std::int64_t i = 0; i < size; ++i)
      accumulator[i] = combine<T, kReduction>(widen(first[i]), widen(second[i]));
  }
  for (std::size_t s = 2; s < num_sources; ++s) {
    const T* const next = reinterpret_cast<const T*>(sources[s]) + begin;
    for (std::int64_t i = 0; i < size; ++i)
      accumulator[i] = combine<T, kReduction>(accumulator[i], widen(next[i]));
  }
  T* const out = reinterpret_cast<T*>(output) + begin;
  for (std::int64_t i = 0; i < size; ++i) out[i] = finish<T, kReduction>(accumulator[i], divisor);
}

template <class T, Reduction kReduction>
[[gnu::always_inline]] inline void reduce_all(const std::byte* const* sources,
                                              std::size_t num_sources, int divisor,
                                              std::byte* output, std::int64_t count) noexcept {
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    reduce_block<T, kReduction>(sources, num_sources, divisor, begin,
                                std::min(kBlock, count - begin), output);
  }
}

// Plain functions, because clones of templates collide between instruction sets. One line per dtype
// and reduction. `divisor` is avg's: the number of ranks, which is that of the sources only where
// one call makes the whole reduction.
using Kernel = void (*)(const std::byte* const* sources, std::size_t num_sources, int divisor,
                        std::byte* output, std::int64_t count);
#define ISOSHARD_KERNEL(name, type, reduction)                                                     \
  ISOSHARD_CLONES void name(const std::byte* const* sources, std::size_t num_sources, int divisor, \
                            std::byte* output, std::int64_t count) {                               \
    reduce_all<type, Reduction::reduction>(sources, num_sources, divisor, output, count);          \
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
    {ISOSHARD_ROW(float64), ISOSHARD_ROW(float32), ISOSHARD_ROW(bfloat16), ISOSHARD_ROW(float16),
     ISOSHARD_ROW(int64), ISOSHARD_ROW(int32), ISOSHARD_ROW(int16), ISOSHARD_ROW(int8),
     ISOSHARD_ROW(uint8), ISOSHARD_ROW(boolean)}};
static_assert(static_cast<int>(Dtype::kBool) == 9 && static_cast<int>(Reduction::kMax) == 3);

Kernel kernel_of(Reduction reduction, Dtype dtype) {
  return kKernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(reduction)];
}

void check_sources(Reduction reduction, Dtype dtype, std::size_t num_sources, std::int64_t count) {
  check_reducible(reduction, dtype);
  if (num_sources == 0)
    throw ShapeError(
        fmt::format("a reduction must have at least one source, got none for {} elements", count));
}

// What a rank adds on the way: avg adds like sum, and divides when all is added.
Reduction step_of(Reduction reduction) {
  return reduction == Reduction::kAvg ? Reduction::kSum : reduction;
}

constexpr std::int64_t kStepBlock = 512;  ///< elements of a partial result between two steps
using StepBuffer = std::array<std::byte, kStepBlock * sizeof(double)>;

}  // namespace

void check_reducible(Reduction reduction, Dtype dtype) {
  if (reduction == Reduction::kAvg && dtype == Dtype::kBool) {
    throw ShapeError(
        "avg is not defined for bool; reduce with sum (any), max (any) or min (all), or convert to "
        "an integer type first");
  }
}

void reduce_ordered(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources,
                    std::byte* output, std::int64_t count) {
  check_sources(reduction, dtype, sources.size(), count);
  kernel_of(reduction, dtype)(sources.data(), sources.size(), static_cast<int>(sources.size()),
                              output, count);
}

void reduce_in_hops(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources,
                    std::byte* output, std::int64_t count) {
  // the accumulator is the dtype: it rounds at every hop anyway
  if (dtype != Dtype::kBFloat16 && dtype != Dtype::kFloat16) {
    reduce_ordered(reduction, dtype, sources, output, count);
    return;
  }
  check_sources(reduction, dtype, sources.size(), count);
  const Kernel step = kernel_of(step_of(reduction), dtype);
  const Kernel last = kernel_of(reduction, dtype);
  alignas(64) StepBuffer partial;  // NOLINT: filled by the first hop
  for (std::int64_t begin = 0; begin < count; begin += kStepBlock) {
    const std::int64_t size = std::min(kStepBlock, count - begin);
    const std::size_t offset = static_cast<std::size_t>(begin) * size_of(dtype);
    std::array<const std::byte*, 2> pair = {sources[0] + offset, nullptr};
    for (std::size_t hop = 1; hop < sources.size(); ++hop) {
      pair[1] = sources[hop] + offset;
      step(pair.data(), 2, 1, partial.data(), size);
      pair[0] = partial.data();
    }
    last(pair.data(), 1, static_cast<int>(sources.size()), output + offset, size);
  }
}

void reduce_in_pairs(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources,
                     std::byte* output, std::int64_t count) {
  check_sources(reduction, dtype, sources.size(), count);
  const Kernel step = kernel_of(step_of(reduction), dtype);
  const Kernel last = kernel_of(reduction, dtype);
  std::vector<StepBuffer> partials(sources.size() / 2);
  std::vector<const std::byte*> nodes(sources.size());
  for (std::int64_t begin = 0; begin < count; begin += kStepBlock) {
    const std::int64_t size = std::min(kStepBlock, count - begin);
    const std::size_t offset = static_cast<std::size_t>(begin) * size_of(dtype);
    for (std::size_t s = 0; s < sources.size(); ++s) nodes[s] = sources[s] + offset;
    for (std::size_t distance = 1; distance < nodes.size(); distance *= 2) {
      for (std::size_t left = 0; left + distance < nodes.size(); left += 2 * distance) {
        const std::array<const std::byte*, 2> pair = {nodes[left], nodes[left + distance]};
        step(pair.data(), 2, 1, partials[left / 2].data(), size);
        nodes[left] = partials[left / 2].data();
      }
    }
    last(nodes.data(), 1, static_cast<int>(sources.size()), output + offset, size);
  }
}

std::int64_t ring_chunk_size(std::int64_t count, int num_ranks) noexcept {
  return (count + num_ranks - 1) / num_ranks;
}

void reduce_block_of_rank(ReductionOrder order, Reduction reduction, Dtype dtype,
                          std::span<const std::byte* const> sources, int last_rank,
                          std::byte* output, std::int64_t count) {
  switch (order) {
    case ReductionOrder::kOrdered:
      return reduce_ordered(reduction, dtype, sources, output, count);
    case ReductionOrder::kTree:
      return reduce_in_pairs(reduction, dtype, sources, output, count);
    case ReductionOrder::kRing: {
      std::vector<const std::byte*> hops(sources.begin(), sources.end());
      std::rotate(hops.begin(), hops.begin() + (last_rank + 1) % static_cast<int>(hops.size()),
                  hops.end());
      return reduce_in_hops(reduction, dtype, hops, output, count);
    }
    case ReductionOrder::kNative:
      break;
  }
  throw UsageError(fmt::format(
      "the reduction order on this backend must be ordered, ring or tree, got {}", name_of(order)));
}

void reduce_part(ReductionOrder order, Reduction reduction, Dtype dtype,
                 std::span<const std::byte* const> sources, PartOfTensor part, std::byte* output,
                 std::int64_t count) {
  if (order != ReductionOrder::kRing) {
    reduce_block_of_rank(order, reduction, dtype, sources, 0, output, count);
    return;
  }
  const std::int64_t chunk =
      ring_chunk_size(part.count_of_tensor, static_cast<int>(sources.size()));
  std::vector<const std::byte*> pieces(sources.size());
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t number = (part.begin + done) / chunk;
    const std::int64_t size = std::min(count - done, (number + 1) * chunk - (part.begin + done));
    const std::size_t offset = static_cast<std::size_t>(done) * size_of(dtype);
    for (std::size_t s = 0; s < sources.size(); ++s) pieces[s] = sources[s] + offset;
    reduce_block_of_rank(order, reduction, dtype, pieces, static_cast<int>(number), output + offset,
                         size);
    done += size;
  }
}

}  // namespace isoshard
