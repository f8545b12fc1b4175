// SPDX-License-Identifier: Apache-2.0
/// Averages of gradients over dp by a reduction and what is done to values before and after it.
#pragma once
#include <ATen/core/Tensor.h>

#include "core/comm/communicator.h"
#include "subjects/parallel/reduction_point.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// The average over `ranks` ranks that `average` asks for. One rank scales nothing.
///
/// Source   kMultiplyFirst: PyTorch DDP, Reducer::mark_variable_ready_dense
///          (torch/csrc/distributed/c10d/reducer.cpp); Megatron-Core, start_grad_sync
///          (distributed/param_and_grad_buffer.py). kDivideFirst: DeepSpeed ZeRO 1 and 2,
///          average_tensor (runtime/zero/stage_1_and_2.py); DDP with gradient_as_bucket_view.
///          kMultiplyLast: DeepSpeed without ZeRO, allreduce_bucket (runtime/engine.py).
///          kDivideLast, kDivideAround (fp16 and fp64): FSDP2, _get_gradient_divide_factors
///          (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
class AveragedReduction {
 public:
  AveragedReduction(GradAverage average, int ranks);
  /// What the collective is called with.
  [[nodiscard]] Reduction reduction() const noexcept { return reduction_; }
  /// Scales values that are going to be reduced, and the reduced ones, in place.
  void scale_before(const at::Tensor& values) const { scale(values, before_); }
  void scale_after(const at::Tensor& values) const { scale(values, after_); }
  /// Writes the same into a declared arithmetic.
  void declare(ReductionPoint& point) const;

 private:
  static void scale(const at::Tensor& values, const ReductionFactor& factor);

  Reduction reduction_ = Reduction::kAvg;
  ReductionFactor before_, after_;
};

}  // namespace isoshard
