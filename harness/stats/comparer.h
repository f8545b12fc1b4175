// SPDX-License-Identifier: Apache-2.0
/// What makes statistics of tensors in host memory elsewhere than in accumulate().
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "harness/stats/stats.h"

namespace isoshard {

/// Two buffers of as many elements, of which each is compared with the one at its place.
struct ComparedPair {
  const std::byte* reference = nullptr;
  const std::byte* actual = nullptr;
  const std::uint8_t* selected = nullptr;  ///< as of accumulate(); nullptr: all elements
  Dtype reference_dtype = Dtype::kFloat32;
  Dtype actual_dtype = Dtype::kFloat32;
  double grad_scale = 1.0;  ///< that `actual` is divided by
};

/// Elements that are one run in the whole tensor, too.
struct ComparedRun {
  std::int64_t count = 0;
  std::int64_t index = 0;  ///< in the whole tensor, of the first one
};

/// Requires     buffers in host memory.
/// Guarantees   counts, maxima and positions are those of accumulate(); sums differ by less than
///              1e-12 of theirs (of the sum of magnitudes, where signs differ).
/// Ranks        local; one thread at a time.
class Comparer {
 public:
  Comparer() = default;
  virtual ~Comparer() = default;
  Comparer(const Comparer&) = delete;
  Comparer& operator=(const Comparer&) = delete;

  /// accumulate() of each run; in the buffers the runs lie one behind the other.
  /// Errors   InfrastructureError with the words of what the comparer stands on.
  virtual void accumulate(Stats& stats, const ComparedPair& pair,
                          std::span<const ComparedRun> runs) = 0;
};

/// Errors   InfrastructureError where what it stands on cannot be had.
using ComparerMaker = std::function<std::unique_ptr<Comparer>()>;

/// How this program makes a comparer on the GPU that is current; empty in a program without CUDA.
/// Whoever has kernels sets it, at the start of the program (harness/recorder/device).
[[nodiscard]] const ComparerMaker& gpu_comparer() noexcept;
void set_gpu_comparer(ComparerMaker make);

}  // namespace isoshard
