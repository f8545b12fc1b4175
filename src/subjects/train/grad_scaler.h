// SPDX-License-Identifier: Apache-2.0
/// Loss scaling across ranks: one scale, one flag, one decision.
#pragma once
#include <functional>
#include <map>
#include <string>

#include "core/comm/communicator.h"
#include "subjects/optim/loss_scale.h"
#include "subjects/optim/optimizer.h"

namespace isoshard {

/// A seam: a faulty test double may stand in from outside.
///
/// Guarantees   every rank of the world has the same scale in each step, and skips the same steps:
///              a gradient that is not finite on one rank, in any part of the model, counts on all
///              ranks.
/// Ranks        found_on_any_rank is collective over the world: one all-reduce of one number
///              (clip_norm on the world axis). The rest is local.
/// Source       torch.amp.GradScaler (scale, unscale_, update);
///              torch.distributed.fsdp.sharded_grad_scaler and Megatron-Core's optimizer.py, which
///              reduce the flag over those who hold parts.
class GradScaler {
 public:
  GradScaler(const LossScaleSettings& settings, Communicator& world)
      : scale_(settings), world_(&world) {}
  virtual ~GradScaler() = default;
  /// The factor of the loss in the current step; the loss is multiplied with it before backward.
  [[nodiscard]] double scale() const noexcept { return scale_.value(); }
  /// Multiplies every gradient by 1 / scale, rounded to fp32, in place. Returns whether one of them
  /// was not finite before.
  [[nodiscard]] bool unscale(NamedTensors& gradients) const;
  [[nodiscard]] virtual bool found_on_any_rank(bool own);
  void update(bool found_inf) noexcept { scale_.update(found_inf); }
  /// For checkpoints: see LossScale.
  [[nodiscard]] std::map<std::string, double, std::less<>> numbers() const {
    return scale_.numbers();
  }
  void restore(const std::map<std::string, double, std::less<>>& numbers) {
    scale_.restore(numbers);
  }

 private:
  LossScale scale_;
  Communicator* world_;
};

}  // namespace isoshard
