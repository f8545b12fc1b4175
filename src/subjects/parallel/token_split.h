// SPDX-License-Identifier: Apache-2.0
/// How ranks share the tokens of a sample: the seam between a training step and context
/// parallelism.
#pragma once
#include <ATen/core/Tensor.h>

#include "core/comm/communicator.h"

namespace isoshard {

/// All ranks that share a sample's tokens get the whole sample, so that each knows how many tokens
/// count without asking.
///
/// Requires     gradients are averaged over dp and over the ranks that share a sample.
class TokenSplit {
 public:
  virtual ~TokenSplit() = default;
  /// How many ranks share a sample (cp).
  [[nodiscard]] virtual int degree() const noexcept = 0;
  /// The tokens that this rank's forward reads.   Shapes   [B,S] -> [B,S / degree].
  /// Errors   ShapeError if the sequence does not divide.   Ranks   local.
  [[nodiscard]] virtual at::Tensor own_tokens(const at::Tensor& whole_BS) const = 0;
  /// The ranks that share a sample.
  [[nodiscard]] virtual Communicator& sharers() const noexcept = 0;
};

}  // namespace isoshard
