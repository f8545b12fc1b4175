// SPDX-License-Identifier: Apache-2.0
/// Products of tensors with numbers, as torch's Python gives them.
#pragma once
#include <ATen/core/Tensor.h>

namespace isoshard {

/// Multiplies in place. 16-bit values are multiplied with the number in fp32 and rounded once, as
/// by `values.mul_(factor)` in Python.
///
/// at::Tensor::mul_(Scalar) is not that: it puts the number first, and then rounds it to the dtype
/// of the values. In bf16 0.999 becomes 1 and 1/3 becomes 0.334.
void scale_in_place(const at::Tensor& values, double factor);

}  // namespace isoshard
