// SPDX-License-Identifier: Apache-2.0
/// The per-dtype numbers that others publish for such comparisons: shown beside every verdict, and
/// held, but too loose to judge by.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "harness/trace/record.h"

namespace isoshard {

struct TensorComparison;

struct PublishedBound {
  std::string what;     ///< "layer outputs, max abs", "loss, relative"
  double limit = 0;     ///< 1e-3 in fp64 and fp32, 0.15 in bf16; 1e-2 for losses
  double measured = 0;  ///< the largest of all tensors the bound is about
  std::string tensor;   ///< where that was
  RecordKey key;
  bool holds = true;
  /// Losses that it is not held to, as legal runs of the reference are farther from it than
  /// `limit`, or as the loss itself has 16 bits.
  int too_wild = 0;
};

/// Layer outputs are the activations whose module is numbered (model.layers.0, transformer.h.11)
/// and those behind the final norm, of step 0: the published comparisons start from equal weights.
/// The published values have unit standard deviation, the largest of 8 million near 5.5: where a
/// reference's largest magnitude is above that, the difference is divided by their ratio. fp16 has
/// no published bound for outputs.
///
/// `response_of` gives how far legal runs of the reference moved a tensor, relative to it; 0 or
/// empty: not known. A training run that blows up doubles every rounding from step to step, and
/// then no two correct runs have losses within the published bound. Nor need they where the loss is
/// computed in 16 bits, in which a sum over tokens is rounded many times.
///
/// Source   docs/internals/seeds.md, sections 1 to 3.
[[nodiscard]] std::vector<PublishedBound> published_bounds(
    const std::vector<TensorComparison>& tensors, Dtype coarsest,
    const std::function<double(const RecordKey&)>& response_of = {});

}  // namespace isoshard
