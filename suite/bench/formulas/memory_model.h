// SPDX-License-Identifier: Apache-2.0
/// How much memory a rank's tensors take, by formula: what docs/reference/bench.md derives.
///
/// Terms. Elements of a rank: P, what it holds of the parameters after the split over tp and pp.
/// e, m, r: bytes of an element of parameters as forward reads them, of masters (what the optimizer
/// steps), of gradients on their way over dp. T: the tokens of a rank's micro-batch.
#pragma once
#include <string>
#include <vector>

#include "fixtures/cases/case.h"

namespace isoshard {

/// All in bytes.
struct RankMemory {
  double parameters = 0;   ///< as forward reads them, whole through the step
  double masters = 0;      ///< and optimizer state
  double gradients = 0;    ///< when backward has ended, buckets included
  double activations = 0;  ///< kept for backward when the most are, without logits
  double logits = 0;
  /// The most at once, and in which moment of a step: "the begin of backward", "the end of
  /// backward" or "the optimizer".
  double peak = 0;
  std::string moment = {};
};

/// Of a step after the first, on the first rank of each pipeline stage (one entry without a
/// pipeline).
/// Requires   a valid case.
[[nodiscard]] std::vector<RankMemory> predicted_memory(const Case& c);

/// The entry that takes most.
[[nodiscard]] RankMemory largest_of(const std::vector<RankMemory>& ranks);

/// Of all ranks together.
[[nodiscard]] double predicted_bytes_of_world(const Case& c);

}  // namespace isoshard
