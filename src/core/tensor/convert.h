// SPDX-License-Identifier: Apache-2.0
/// Between ATen's tensors and those of files and traces.
#pragma once
#include <ATen/core/Tensor.h>

#include "core/base/host_tensor.h"

namespace isoshard {

/// Errors   ShapeError for a dtype the project does not know.
[[nodiscard]] Dtype dtype_of(const at::Tensor& tensor);
[[nodiscard]] at::ScalarType scalar_type_of(Dtype dtype) noexcept;

/// The same bytes, which the result keeps alive if the tensor has an owner. They are read-only:
/// clone the result to change it.
[[nodiscard]] at::Tensor tensor_of(const HostTensor& tensor);

/// The tensor's values, outside of the autograd graph: its own bytes, kept alive, if it is a dense
/// contiguous tensor in CPU memory, else a copy.
/// Errors   as dtype_of.
[[nodiscard]] HostTensor host_tensor_of(const at::Tensor& tensor);

}  // namespace isoshard
