// SPDX-License-Identifier: Apache-2.0
// The number as the second operand.
#include "core/tensor/scale.h"

#include <ATen/ATen.h>

namespace isoshard {

void scale_in_place(const at::Tensor& values, double factor) {
  at::Tensor number = at::scalar_tensor(factor, values.options().dtype(at::kDouble));
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  values.mul_(number);
}

}  // namespace isoshard
