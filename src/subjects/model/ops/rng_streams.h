// SPDX-License-Identifier: Apache-2.0
/// Where a training run's random masks come from.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "core/mesh/layout.h"

namespace isoshard {

/// A part of one dropout mask of one step, in the coordinates of the whole: dim 0 are the samples
/// of the step's global batch (all dp ranks and micro-batches, in the order in which global batches
/// take them), the other dims are whole positions, heads, features.
struct MaskPart {
  std::string_view site;  ///< "transformer.h.0.attn.resid_dropout"
  int step = 0;
  double rate = 0;     ///< probability that an element is dropped, in [0, 1)
  Shape global_shape;  ///< of dim 0 nothing is read
  Shape offset, size;
  bool is_recomputed = false;  ///< asked for again while backward repeats a forward pass
};

/// A seam: a faulty test double may stand in from outside. The class itself draws from the counter
/// generator (core/random/keep_bits.h).
///
/// Guarantees   an element's bit depends on seed, site, step, its place in the whole tensor, and
///              the rate, so ranks that hold different parts draw different bits of one mask, ranks
///              that hold the same part the same ones, and a second draw equals the first.
/// Ranks        local.
class RngStreams {
 public:
  explicit RngStreams(std::uint64_t seed) : seed_(seed) {}
  virtual ~RngStreams() = default;
  /// Shapes   bool [part.size], contiguous; true: kept.   Errors   ShapeError for a part that is
  ///          not inside its whole.
  [[nodiscard]] virtual at::Tensor keep_mask(const MaskPart& part) const;
  [[nodiscard]] std::uint64_t seed() const noexcept { return seed_; }
  /// Resumes with the masks of this seed. There is no other state, because the place of a mask in
  /// the stream follows from its step and its elements' indices.
  void restore(std::uint64_t seed) noexcept { seed_ = seed; }

 private:
  std::uint64_t seed_;
};

}  // namespace isoshard
