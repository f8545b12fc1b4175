// SPDX-License-Identifier: Apache-2.0
/// Inputs and weights of experiments: normals by name, of which a rank reads its own part.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "core/base/dtype.h"
#include "core/mesh/layout.h"

namespace isoshard {

/// Values N(0, std) that depend on seed, name and index in the whole tensor only.
struct Drawn {
  std::string name;
  Shape shape;
  double std = 1;
  std::uint64_t seed = 0;
  c10::Device device = c10::Device(c10::DeviceType::CPU);

  [[nodiscard]] at::Tensor whole(Dtype dtype) const;
  /// The `index`-th of `parts` equal parts along `dim`.   Errors   UsageError with the numbers if
  /// they do not divide.
  [[nodiscard]] at::Tensor part(Dtype dtype, int dim, int index, int parts) const;
};

}  // namespace isoshard
