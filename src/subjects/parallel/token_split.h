// SPDX-License-Identifier: Apache-2.0
/// How ranks share the tokens of a sample: the seam between a training step and context parallelism.
#pragma once
#include <ATen/core/Tensor.h>

#include "core/comm/communicator.h"

namespace isoshard {

/// All ranks that share a sample's tokens get the whole sample, so that each knows how many tokens
/// count without asking.
///
/// Requires     gradients are averaged over `averaged_over()`: the ranks of dp, and for each those
///              that share its samples.
class TokenSplit {
 public:
  virtual ~TokenSplit() = default;
  /// How many ranks share a sample (cp).
  [[nodiscard]] virtual int degree() const noexcept = 0;
  /// The tokens that this rank's forward reads.   Shapes   [B,S] -> [B,S / degree].
  /// Errors   ShapeError if the sequence does not divide.   Ranks   local.
  [[nodiscard]] virtual at::Tensor own_tokens(const at::Tensor& whole_BS) const = 0;
  [[nodiscard]] virtual Communicator& averaged_over() const noexcept = 0;
};

}  // namespace isoshard
