// SPDX-License-Identifier: Apache-2.0
/// Which tokens of a sequence each cp rank has.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/parallel/range.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// kHeadTail: the sequence is cut into 2 cp equal chunks, and rank r has chunks r and 2 cp - 1 - r,
/// so that under a causal mask all ranks have equally much to do. kContiguous: rank r has the r-th
/// of cp equal parts.
/// Source   torch/distributed/tensor/experimental/_attention.py (_RoundRobinLoadBalancer).
class ContextSplit {
 public:
  ContextSplit(ContextOrder order, int degree, int rank)
      : order_(order), degree_(degree), rank_(rank) {}
  [[nodiscard]] int degree() const noexcept { return degree_; }
  /// The tokens of a rank, in the order in which it has them.
  /// Errors   ShapeError unless `length` is a multiple of 2 cp (kHeadTail) or cp.
  [[nodiscard]] std::vector<Range> tokens_of(int rank, std::int64_t length) const;
  [[nodiscard]] std::vector<Range> own_tokens(std::int64_t length) const {
    return tokens_of(rank_, length);
  }
  /// int64 [length / cp]: the places of a rank's tokens.
  [[nodiscard]] at::Tensor positions_of(int rank, std::int64_t length) const;
  [[nodiscard]] at::Tensor positions(std::int64_t length) const {
    return positions_of(rank_, length);
  }
  /// int64 [length]: where each token is among those of all ranks, one rank after the other.
  [[nodiscard]] at::Tensor places_of_gathered(std::int64_t length) const;
  /// A rank's tokens along `dim`, contiguous.
  [[nodiscard]] at::Tensor part_of(int rank, const at::Tensor& whole, int dim) const;
  [[nodiscard]] at::Tensor own_part(const at::Tensor& whole, int dim) const {
    return part_of(rank_, whole, dim);
  }
  /// From a layout that is right but for the tokens: its dim `dim`, of the own tokens, becomes that
  /// of all, in which they lie where they belong.
  [[nodiscard]] Layout over_tokens(Layout layout, int dim, const MeshShape& mesh, int rank) const;

 private:
  ContextOrder order_;
  int degree_, rank_;
};

}  // namespace isoshard
