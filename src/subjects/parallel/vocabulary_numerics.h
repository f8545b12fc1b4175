// SPDX-License-Identifier: Apache-2.0
/// The part of a declared arithmetic that cuts the vocabulary over tp.
#pragma once
#include <cstdint>
#include <vector>

#include "core/base/dtype.h"
#include "subjects/parallel/range.h"
#include "subjects/parallel/reduction_point.h"

namespace isoshard {

/// A vocabulary that is cut over tp, and the loss of logits that stay cut along it.
///
/// Of one token: x its logits on a rank, y its target, V the size, a the label smoothing, s = a V /
/// (V - 1), c the token's weight. Every line rounds to `loss_dtype`; sums over columns are one op
/// on a block of tokens.
///
///     M = max x, over tp;  z = x - M
///     E = sum exp(z), over tp; T = z[y], or 0 where y is another rank's, over tp; S = sum z, over
///       tp
///     loss      (log E - T), smoothed: (log E - T) (1 - s) + (log E - S / V) s
///     gradient p = exp((x - M) - log E); p -= s / V; p[y] += s - 1; p c, rounded to the logits'
///       dtype
///
/// Columns behind a rank's entries are padding: they enter nothing, and their gradient is 0.
struct SplitVocabulary {
  std::int64_t size = 0;
  std::vector<Range> by_rank;  ///< entries of each tp rank; empty where a rank has padding only
  Dtype loss_dtype = Dtype::kFloat32;
  /// A block has as many whole tokens as fit, at least one
  std::int64_t logits_per_block = 1 << 18;
  ReductionPoint embedding_output;     ///< over tp, forward
  ReductionPoint head_input_gradient;  ///< over tp, backward
  ReductionPoint largest_logit;        ///< M
  ReductionPoint sum_of_exponentials;  ///< E
  ReductionPoint target_logit;         ///< T
  ReductionPoint sum_of_logits;        ///< S, with label smoothing only
};

}  // namespace isoshard
