// SPDX-License-Identifier: Apache-2.0
// Factors beside a sum.
#include "subjects/parallel/grad_average.h"

#include <ATen/ATen.h>

#include "core/tensor/scale.h"

namespace isoshard {
namespace {

// The smallest power of 2 that is at least the root of `ranks`, or that no longer divides it.
double first_divisor(int ranks) {
  int divisor = 1;
  while (ranks % divisor == 0 && ranks > divisor * divisor) divisor *= 2;
  return divisor;
}

}  // namespace

AveragedReduction::AveragedReduction(GradAverage average, int ranks) {
  if (average == GradAverage::kInCollective || ranks == 1) return;
  reduction_ = Reduction::kSum;
  const double n = ranks;
  switch (average) {
    case GradAverage::kInCollective:
      return;
    case GradAverage::kMultiplyFirst:
      before_ = {1 / n, false};
      return;
    case GradAverage::kDivideFirst:
      before_ = {n, true};
      return;
    case GradAverage::kMultiplyLast:
      after_ = {1 / n, false};
      return;
    case GradAverage::kDivideLast:
      after_ = {n, true};
      return;
    case GradAverage::kDivideAround:
      before_ = {first_divisor(ranks), true};
      after_ = {n / before_.value, true};
      return;
  }
}

void AveragedReduction::scale(const at::Tensor& values, const ReductionFactor& factor) {
  if (factor.value == 1) return;
  if (factor.divides) {
    values.div_(factor.value);
  } else {
    scale_in_place(values, factor.value);
  }
}

void AveragedReduction::declare(ReductionPoint& point) const {
  point.reduction = reduction_;
  point.before = before_;
  point.after = after_;
}

}  // namespace isoshard
