// SPDX-License-Identifier: Apache-2.0
/// What a wrong tensor of a checkpoint is, told by its bytes alone: what converting and resharding
/// programs do to tensors.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/checkpoints/stored_checkpoint.h"
#include "harness/ids/cause.h"

namespace isoshard {

/// Finds known patterns. Reads every reference tensor once, at the first question.
///
/// Requires   both checkpoints live as long as this object.
class StoredCauses {
 public:
  StoredCauses(const StoredTensors& reference, const StoredTensors& actual)
      : reference_(reference), actual_(actual) {}

  /// The cause for a tensor that both have and that differs, if its bits are those of another
  /// tensor, of the transposed one, or of parts of dim 0 in another order. Tensors of one value all
  /// over are not told apart.
  [[nodiscard]] Cause cause_of(const std::string& name);

 private:
  [[nodiscard]] Cause other_tensor(const std::string& name, const HostTensor& actual);

  const StoredTensors &reference_, &actual_;
  std::multimap<std::uint64_t, std::string> names_by_digest_;  ///< of the reference
};

}  // namespace isoshard
