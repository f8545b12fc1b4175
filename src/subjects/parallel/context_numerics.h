// SPDX-License-Identifier: Apache-2.0
/// The part of a declared arithmetic over cp: which tokens each rank has, and how its queries meet
/// the keys of others.
#pragma once
#include <optional>
#include <vector>

#include "core/base/dtype.h"
#include "subjects/parallel/reduction_point.h"

namespace isoshard {

/// Blocks of keys are met one after the other: in turn j cp rank r has those of rank r - j, and
/// leaves out a block that none of its queries sees. Results are merged in `merge_dtype` as
/// merge_block has it, and rounded at the end. The gradient of a block's keys and values begins as
/// its owner's, and ranks behind the owner add theirs in turn, all in fp32 (fp64 of fp64).
struct RingNumerics {
  std::optional<Dtype> merge_dtype;  ///< none: fp32, fp64 of fp64
};

/// A sequence is cut into `num_chunks` equal chunks; cp rank r has chunks_of_rank[r], in that
/// order. All other ops see these tokens as if they followed each other.
struct ContextNumerics {
  int num_chunks = 1;
  std::vector<std::vector<int>> chunks_of_rank;  ///< empty: every rank has all tokens
  /// None: keys and values are gathered and brought into the order of the tokens; queries meet all
  /// of them at once.
  std::optional<RingNumerics> ring;
  /// Gathered keys' and values': the part of each rank one after the other, over cp
  ReductionPoint keys_gradient;
  ReductionPoint loss_sums;  ///< of each sample's tokens, over cp, fp64
};

}  // namespace isoshard
