// SPDX-License-Identifier: Apache-2.0
/// An emulated rank's part of the tokens, and its attention to those of others.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/model/strategy.h"
#include "subjects/parallel/context_numerics.h"
#include "suite/emulation/emulated_world.h"

namespace isoshard {

/// Requires     `numerics` and `world` outlive it, and it outlives the autograd graph.
/// Ranks        what is said to be collective is so over cp, forward and backward.
/// Source       ContextNumerics. Shares with src/subjects/parallel only the arithmetic of one block
///              (subjects/model/ops/block_attention.h).
class EmulatedContext {
 public:
  /// Errors   UsageError unless each chunk is given to one of the cp ranks.
  EmulatedContext(const ContextNumerics& numerics, EmulatedWorld& world, int rank);
  [[nodiscard]] bool is_cut() const noexcept { return !numerics_->chunks_of_rank.empty(); }
  [[nodiscard]] bool is_ring() const noexcept { return numerics_->ring.has_value(); }
  /// cp.
  [[nodiscard]] int degree() const { return world_->degree(Axis::kCp); }
  /// int64: the places of a cp rank's tokens in a sequence of `length`.
  /// Errors   ShapeError unless chunks are equal.
  [[nodiscard]] at::Tensor positions_of(int cp_rank, std::int64_t length) const;
  [[nodiscard]] at::Tensor own_positions(std::int64_t length) const {
    return positions_of(cp_rank_, length);
  }
  /// Along dim 1.
  [[nodiscard]] at::Tensor own_tokens(const at::Tensor& whole_BS) const;
  /// Dim `dim` of the layout, of the own tokens, becomes that of all.
  [[nodiscard]] Layout over_tokens(Layout layout, const at::Tensor& local, int dim) const;
  /// Keys and values of all tokens, in their order.   Ranks   collective.
  [[nodiscard]] KeysValues gathered(const KeysValues& own, std::string_view module) const;
  /// [B,S / cp,N D].   Ranks   collective.
  [[nodiscard]] at::Tensor ring(const at::Tensor& q_BNSD, const KeysValues& own,
                                std::string_view module) const;

  /// `parts` of all cp ranks, one after the other in a new dim 0.
  [[nodiscard]] at::Tensor of_all(const at::Tensor& own, std::string_view what) const;
  [[nodiscard]] at::Tensor reduced(const at::Tensor& parts, std::string_view what) const;
  [[nodiscard]] int cp_rank() const noexcept { return cp_rank_; }
  [[nodiscard]] const ContextNumerics& numerics() const noexcept { return *numerics_; }

 private:
  const ContextNumerics* numerics_;
  EmulatedWorld* world_;
  int rank_, cp_rank_;
};

}  // namespace isoshard
