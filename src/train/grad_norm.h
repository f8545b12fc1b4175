// SPDX-License-Identifier: Apache-2.0
/// The global gradient norm of a model that is split over tp.
#pragma once
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "model/model.h"
#include "optim/optimizer.h"
#include "parallel/tensor/shard_plan.h"

namespace isoshard {

/// A seam: a faulty twin may stand in from outside.
class GradNorm {
 public:
  virtual ~GradNorm() = default;
  /// The norm of the whole model's gradient, equal on every rank. `gradients` are this rank's, after averaging over dp.
  [[nodiscard]] virtual double norm(const NamedTensors& gradients) = 0;
};

/// Squares of parameters that are split are summed over tp, of replicated ones and of copied shards counted once; all in fp64.
///
/// Ranks        collective over `tp` (clip_norm: one fp64 per split parameter, one segment each).
/// Determinism  the parameters' sums are added in model order, so one rank and a tp degree of 1 give the same bits.
class GlobalGradNorm final : public GradNorm {
 public:
  GlobalGradNorm(std::vector<ParameterSpec> specs, const ShardPlan& plan, Communicator& tp);
  [[nodiscard]] double norm(const NamedTensors& gradients) override;

 private:
  std::vector<ParameterSpec> specs_;
  ShardPlan plan_;
  std::vector<Segment> split_;  ///< one per split parameter, in model order
  Communicator* tp_;
};

}  // namespace isoshard
