// SPDX-License-Identifier: Apache-2.0
// Parts of named normals.
#include "suite/published/drawn.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/model/weights.h"

namespace isoshard {

at::Tensor Drawn::whole(Dtype dtype) const {
  return part(dtype, 0, 0, 1);
}

at::Tensor Drawn::part(Dtype dtype, int dim, int index, int parts) const {
  const auto d = static_cast<std::size_t>(dim);
  if (shape.at(d) % parts != 0)
    throw UsageError(fmt::format("dim {} of {} must be divisible into {} parts, got size {}", dim,
                                 name, parts, shape[d]));
  Shape offset(shape.size(), 0), size = shape;
  size[d] /= parts;
  offset[d] = index * size[d];
  ParameterSpec spec;
  spec.name = name;
  spec.shape = shape;
  return InitialWeights(seed, std, false)
      .read(spec, offset, size)
      .to(scalar_type_of(dtype))
      .to(device);
}

}  // namespace isoshard
