// SPDX-License-Identifier: Apache-2.0
/// The thin layer of the communicator that takes at::Tensor: non-contiguous tensors, shape checks.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "core/comm/communicator.h"
#include "core/tensor/convert.h"

namespace isoshard {

/// All elements of a contiguous tensor, with the device it is on and the stream that is current
/// there.
/// Errors  ShapeError for a device that no backend knows.
[[nodiscard]] Buffer buffer_of(const at::Tensor& tensor);

/// In place, any strides (a non-contiguous tensor is packed, reduced and written back).
/// Ranks   collective over `comm`; shapes and dtypes equal.
/// Errors  ShapeError if the tensor is not dense, its device is not known, or it requires grad
///         outside no_grad.
Work all_reduce(Communicator& comm, at::Tensor tensor, Reduction reduction, const CallInfo& info);
/// Gathers along dim 0 into a new tensor [size * d0, ...].
[[nodiscard]] at::Tensor all_gather(Communicator& comm, const at::Tensor& tensor,
                                    const CallInfo& info);
/// Reduces [size * d0, ...] and returns this rank's [d0, ...].
/// Errors  ShapeError if dim 0 is not divisible by the group size.
[[nodiscard]] at::Tensor reduce_scatter(Communicator& comm, const at::Tensor& tensor,
                                        Reduction reduction, const CallInfo& info);
Work broadcast(Communicator& comm, at::Tensor tensor, int root, const CallInfo& info);

}  // namespace isoshard
