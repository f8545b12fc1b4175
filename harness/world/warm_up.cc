// SPDX-License-Identifier: Apache-2.0
/// A toy step through the kernels that models use.
#include "harness/world/warm_up.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

namespace isoshard {

void make_controller() {
  at::set_num_threads(1);
}

void warm_up_kernels() {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = at::ones({4, 8}, at::TensorOptions().dtype(dtype));
    const at::Tensor weight = at::ones({8, 8}, at::TensorOptions().dtype(dtype)).requires_grad_();
    const at::Tensor hidden = at::silu(at::matmul(x, weight.t()));
    at::softmax(hidden, -1).mul(hidden).sum().backward();
  }
}

}  // namespace isoshard
