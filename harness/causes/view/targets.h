// SPDX-License-Identifier: Apache-2.0
/// The reference's logits of a step and the tokens that they are to predict.
#pragma once
#include <cstdint>
#include <vector>

#include "harness/causes/view/evidence.h"

namespace isoshard::detail {

/// The reference's labels of the tensor's step, a micro-batch each.
[[nodiscard]] std::vector<const Record*> labels_of_step(const Evidence& e);
/// The reference's logits of a micro-batch: the last activation that is as long as the labels.
[[nodiscard]] const Record* logits_beside(const Evidence& e, const Record& labels);

/// Whether the logits of a step are few enough to be looked at token by token (2^24): with their
/// gradients and their softmax they are in memory some seven times, in fp64. A diagnosis may not
/// end the verdict.
[[nodiscard]] bool are_few_logits(const Evidence& e, const std::vector<const Record*>& labels);

/// A token that has a target.
struct Target {
  std::int64_t sample = 0, token = 0;
  std::int64_t row = 0;     ///< of logits [B,S,V] as a matrix
  std::int64_t column = 0;  ///< the id that is to follow
};

/// Of labels [B,S], in the order of their rows; the last token of a sample has none, and a label
/// outside of the vocabulary is none.
[[nodiscard]] std::vector<Target> targets_in(const Values& labels, std::int64_t vocabulary);

}  // namespace isoshard::detail
