// SPDX-License-Identifier: Apache-2.0
/// The lines of a golden of one step: what is stored of each tensor, and what may drift.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "harness/golden/golden.h"
#include "harness/trace/trace.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// What one rank holds of a tensor, as it holds it.
struct RankElements {
  int rank = 0;
  std::vector<double> elements;
  double grad_scale = 1;
};

/// Of every rank that holds a part, in the order of ranks.
/// Errors   VacuousError if the run did not keep everything.
[[nodiscard]] std::vector<RankElements> elements_of(const Trace& trace, const RecordKey& key);

/// The projections of all ranks' elements together.
[[nodiscard]] Projections project(const RecordKey& key, std::span<const RankElements> ranks);

/// How far, as a Frobenius norm over all ranks' elements, correct runs may be apart: what the judge
/// allows the tensor, relative to the elements of all ranks, or in units of one element.
[[nodiscard]] double allowed_distance(const TensorComparison& tensor,
                                      std::span<const RankElements> ranks);

/// Whether every machine gives the tensor these bits: what the judge holds to be exact, and the
/// embedding of the first step, whose rows are copies of weights as read.
[[nodiscard]] bool is_equal_everywhere(const TensorComparison& tensor);

/// The lines of a run that kept everything, in execution order; projections are exact, with what
/// they may drift.
[[nodiscard]] std::vector<GoldenLine> lines_of_step(const Verdict& verdict, const Trace& trace);

}  // namespace isoshard
