// SPDX-License-Identifier: Apache-2.0
/// The global gradient norm of a model that is split over tp, and whose gradients may be cut over
/// dp.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "subjects/model/model.h"
#include "subjects/optim/clip.h"
#include "subjects/optim/optimizer.h"
#include "subjects/parallel/tensor/shard_plan.h"

namespace isoshard {

/// A seam: a faulty test double may stand in from outside.
class GradNorm {
 public:
  virtual ~GradNorm() = default;
  /// The norm of the whole model's gradient, equal on every rank. `gradients` are of this rank's
  /// pieces, after averaging over dp.
  [[nodiscard]] virtual double norm(const NamedTensors& gradients) = 0;
  /// What gradients with this norm are multiplied with so that it becomes at most `max_norm`.
  [[nodiscard]] virtual double factor(double norm, double max_norm) {
    return clip_factor(norm, max_norm);
  }
};

/// How a pipeline makes one norm of the gradients of its stages.
struct NormOverStages {
  Communicator* pp = nullptr;
  /// The parameters whose squares this rank counts: those that it has, but for one that an earlier
  /// stage counts, too.
  std::set<std::string, std::less<>> counted;
};

/// Squares of split parameters are summed over tp; replicated parameters and copied shards count
/// once. All sums are in fp64.
///
/// Ranks        collective over `dp`, if given (clip_norm: one fp64 per parameter, one segment
///              each), then over `tp` (the same of split parameters only), then over pp, if given.
/// Determinism  the parameters' sums are added in model order, so one rank and a tp degree of 1
///              give the same bits.
class GlobalGradNorm final : public GradNorm {
 public:
  /// `dp` is the group over which gradients are split in pieces; nullptr if every rank has all of
  /// them.
  GlobalGradNorm(std::vector<ParameterSpec> specs, const ShardPlan& plan, Communicator& tp,
                 Communicator* dp = nullptr, NormOverStages stages = {});
  [[nodiscard]] double norm(const NamedTensors& gradients) override;

 private:
  std::vector<ParameterSpec> specs_;
  ShardPlan plan_;
  std::vector<Segment> all_, split_;  ///< one per parameter and per split parameter, in model order
  Communicator *tp_, *dp_;
  NormOverStages stages_;
};

}  // namespace isoshard
