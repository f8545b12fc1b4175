// SPDX-License-Identifier: Apache-2.0
/// Gradients of ZeRO 2: they are averaged bucket by bucket while backward runs, sent to the dp
/// ranks that step them, and freed.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "subjects/optim/optimizer.h"
#include "subjects/parallel/ddp/gradient_reducer.h"
#include "subjects/parallel/zero/partition.h"

namespace isoshard {

/// A bucket's flat buffer holds dp rank 0's runs of all its parameters, then rank 1's, ...: one
/// reduce_scatter gives each rank its own.
///
/// Requires     arm() before every backward of a step, finish() after it.
/// Guarantees   after finish() no parameter has a gradient; pieces() are the sums over the
///              backwards since clear() of this rank's runs of the averages, in the parameters'
///              dtype or in `accumulate_dtype`. A parameter without gradient enters as zeros.
/// Ranks        collective over `dp`; parameters in equal order, with equal shapes, of one dtype.
/// Determinism  buckets start in their fixed order. As the communicator's reduction order.
class OwnerReducer {
 public:
  OwnerReducer(std::vector<ReducedParameter> parameters, ZeroPartition partition, Communicator& dp,
               std::int64_t bucket_bytes, GradAverage average = GradAverage::kInCollective,
               std::optional<Dtype> accumulate_dtype = {});
  ~OwnerReducer();
  OwnerReducer(const OwnerReducer&) = delete;
  OwnerReducer& operator=(const OwnerReducer&) = delete;
  void clear();
  void arm();
  void finish();
  /// By parameter name; empty tensors where this rank steps nothing.
  [[nodiscard]] const NamedTensors& pieces() const noexcept;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isoshard
