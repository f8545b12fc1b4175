// SPDX-License-Identifier: Apache-2.0
/// What a wrong tensor of a checkpoint is, told by its bytes alone: what converting and resharding
/// programs do to tensors.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/checkpoints/stored_checkpoint.h"

namespace isoshard {

/// Finds known patterns. Reads every reference tensor once, at the first question.
///
/// Requires   both checkpoints live as long as this object.
class StoredCauses {
 public:
  StoredCauses(const StoredTensors& reference, const StoredTensors& actual)
      : reference_(reference), actual_(actual) {}

  /// Of a tensor that both have and that differs, "" or, bit by bit:
  ///
  ///   A and B are exchanged | equals A of the reference
  ///   transposed
  ///   the halves (the n parts) of dim 0 are in the order 1, 0
  /// Tensors of one value all over are not told apart.
  [[nodiscard]] std::string cause_of(const std::string& name);

 private:
  [[nodiscard]] std::string other_tensor(const std::string& name, const HostTensor& actual);

  const StoredTensors &reference_, &actual_;
  std::multimap<std::uint64_t, std::string> names_by_digest_;  ///< of the reference
};

}  // namespace isoshard
