// SPDX-License-Identifier: Apache-2.0
/// A call when backward has accumulated the gradient of a leaf.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

namespace isoshard {

/// Replaces an earlier hook of this leaf. The hook lives as long as the leaf: `callback` must know
/// when what it points to is gone.
void set_accumulated_hook(const at::Tensor& leaf,
                          std::function<void(const at::Tensor& leaf)> callback);

}  // namespace isoshard
