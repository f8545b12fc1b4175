// SPDX-License-Identifier: Apache-2.0
/// Whether a column-parallel output is bit-equal to its part of the whole product, which depends on
/// kernel, dtype, shape and tp.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "harness/world/rank.h"

namespace isoshard {

/// x [rows, in] times weight [out, in].
struct ProductShape {
  std::int64_t rows, in, out;
};

struct ColumnProbe {
  Dtype dtype = Dtype::kFloat32;
  ProductShape shape{};
  int tp = 1;
  std::int64_t unequal = 0;  ///< elements whose bits differ
  double max = 0;            ///< largest difference

  [[nodiscard]] bool bit_equal() const noexcept { return unequal == 0; }
};

/// Shapes that are small, odd, wide and tall, and those of models; every `out` divides by 2, 4 and
/// 7.
[[nodiscard]] std::span<const ProductShape> probed_shapes();

/// Multiplies by the rank's rows of the weight with the column-parallel layer, gathers, and
/// compares with the whole product.
/// Ranks    collective over rank.comm(); the same result on all ranks.
/// Errors   UsageError with the numbers if the world size does not divide `out`.
[[nodiscard]] ColumnProbe probe_column(Rank& rank, Dtype dtype, const ProductShape& shape,
                                       std::uint64_t seed,
                                       c10::Device device = c10::Device(c10::DeviceType::CPU));

}  // namespace isoshard
