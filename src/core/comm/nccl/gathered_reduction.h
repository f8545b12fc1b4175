// SPDX-License-Identifier: Apache-2.0
/// Reductions of what a rank has gathered from all, element by element: the one body that runs in
/// kernels of CUDA and, for tests and stand-ins, on the CPU. Bit-equal to core/comm/reduce.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"
#include "core/base/host_device.h"
#include "core/comm/reduction_step.h"

namespace isoshard {

/// `num_sources` pieces of `count` elements lie `stride_bytes` apart, by group rank.
struct GatheredReduction {
  ReductionOrder order = ReductionOrder::kOrdered;  ///< kOrdered, kRing or kTree
  Reduction reduction = Reduction::kSum;
  Dtype dtype = Dtype::kFloat32;
  const std::byte* gathered = nullptr;
  std::size_t stride_bytes = 0;
  int num_sources = 1;
  /// Ring: element i belongs to chunk (begin + i) / chunk, whose number is the rank that it ends
  /// on; where chunk is 0, all end on `last_rank`.
  std::int64_t begin = 0;
  std::int64_t chunk = 0;
  int last_rank = 0;
  std::byte* output = nullptr;  ///< may be one of the pieces
  std::int64_t count = 0;
};

inline constexpr int kMaxTreeLevels = 11;  ///< of 1024 ranks

template <class T>
ISOSHARD_HOST_DEVICE inline reduction::Accumulator<T> source_of(const GatheredReduction& task,
                                                                int source, std::int64_t i) {
  const std::byte* const piece =
      task.gathered + task.stride_bytes * static_cast<std::size_t>(source);
  return reduction::widen(reinterpret_cast<const T*>(piece)[i]);
}

/// docs/internals/reduction.md, "ordered".
template <class T, Reduction kReduction>
ISOSHARD_HOST_DEVICE inline T ordered_element(const GatheredReduction& task, std::int64_t i) {
  reduction::Accumulator<T> sum = source_of<T>(task, 0, i);
  for (int source = 1; source < task.num_sources; ++source)
    sum = reduction::combine<T, kReduction>(sum, source_of<T>(task, source, i));
  return reduction::finish<T, kReduction>(sum, task.num_sources);
}

/// docs/internals/reduction.md, "ring": from the rank after the last one around to it, rounded at
/// each.
template <class T, Reduction kReduction>
ISOSHARD_HOST_DEVICE inline T ring_element(const GatheredReduction& task, std::int64_t i) {
  const int last =
      task.chunk == 0 ? task.last_rank : static_cast<int>((task.begin + i) / task.chunk);
  int source = (last + 1) % task.num_sources;
  reduction::Accumulator<T> sum = source_of<T>(task, source, i);
  for (int hop = 1; hop < task.num_sources; ++hop) {
    source = (source + 1) % task.num_sources;
    sum = reduction::widen(reduction::narrow<T>(
        reduction::combine<T, kReduction>(sum, source_of<T>(task, source, i))));
  }
  return reduction::finish<T, kReduction>(sum, task.num_sources);
}

/// docs/internals/reduction.md, "tree". The sums that wait for a partner are those of blocks of the
/// powers of two that the number of sources so far is made of, as a counter carries its bits; those
/// that are left at the end have waited for the next levels, the smallest first.
template <class T, Reduction kReduction>
ISOSHARD_HOST_DEVICE inline T tree_element(const GatheredReduction& task, std::int64_t i) {
  reduction::Accumulator<T> waiting[kMaxTreeLevels];  // NOLINT: filled below num_waiting
  int num_waiting = 0;
  for (int source = 0; source < task.num_sources; ++source) {
    reduction::Accumulator<T> sum = source_of<T>(task, source, i);
    for (int carries = source + 1; carries % 2 == 0; carries /= 2)
      sum = reduction::widen(
          reduction::narrow<T>(reduction::combine<T, kReduction>(waiting[--num_waiting], sum)));
    waiting[num_waiting++] = sum;
  }
  reduction::Accumulator<T> sum = waiting[--num_waiting];
  while (num_waiting > 0)
    sum = reduction::widen(
        reduction::narrow<T>(reduction::combine<T, kReduction>(waiting[--num_waiting], sum)));
  return reduction::finish<T, kReduction>(sum, task.num_sources);
}

template <class T, Reduction kReduction>
ISOSHARD_HOST_DEVICE inline void reduce_element(const GatheredReduction& task, std::int64_t i) {
  T* const output = reinterpret_cast<T*>(task.output) + i;
  if (task.order == ReductionOrder::kRing) {
    *output = ring_element<T, kReduction>(task, i);
  } else if (task.order == ReductionOrder::kTree) {
    *output = tree_element<T, kReduction>(task, i);
  } else {
    *output = ordered_element<T, kReduction>(task, i);
  }
}

namespace detail {

template <class T, class Run>
void with_reduction_of(const GatheredReduction& task, const Run& run) {
  switch (task.reduction) {
    case Reduction::kSum:
      return run.template operator()<T, Reduction::kSum>();
    case Reduction::kAvg:
      return run.template operator()<T, Reduction::kAvg>();
    case Reduction::kMin:
      return run.template operator()<T, Reduction::kMin>();
    case Reduction::kMax:
      return run.template operator()<T, Reduction::kMax>();
  }
}

}  // namespace detail

/// Calls run.operator()<T, kReduction>() with the types of the task.
template <class Run>
void with_types_of(const GatheredReduction& task, const Run& run) {
  switch (task.dtype) {
    case Dtype::kFloat64:
      return detail::with_reduction_of<double>(task, run);
    case Dtype::kFloat32:
      return detail::with_reduction_of<float>(task, run);
    case Dtype::kBFloat16:
      return detail::with_reduction_of<reduction::Bf16>(task, run);
    case Dtype::kFloat16:
      return detail::with_reduction_of<reduction::Fp16>(task, run);
    case Dtype::kInt64:
      return detail::with_reduction_of<std::int64_t>(task, run);
    case Dtype::kInt32:
      return detail::with_reduction_of<std::int32_t>(task, run);
    case Dtype::kInt16:
      return detail::with_reduction_of<std::int16_t>(task, run);
    case Dtype::kInt8:
      return detail::with_reduction_of<std::int8_t>(task, run);
    case Dtype::kUint8:
      return detail::with_reduction_of<std::uint8_t>(task, run);
    case Dtype::kBool:
      return detail::with_reduction_of<reduction::Bool>(task, run);
  }
}

/// The task on the CPU, as a kernel does it.
void reduce_gathered(const GatheredReduction& task);

}  // namespace isoshard
