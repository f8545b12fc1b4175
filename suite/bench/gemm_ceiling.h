// SPDX-License-Identifier: Apache-2.0
/// How fast this machine multiplies matrices: what utilization is measured against.
///
/// Words. A *moment* is a place in a run, between two steps, at which all ranks multiply square
/// matrices, one kind after the other: a size and a layout. So they have the processes, threads and
/// cores of the steps, and the other load of the machine slows both. The *ceiling* is the most that
/// all ranks together reached with any kind at any moment.
#pragma once
#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/dtype.h"

namespace isoshard {

inline constexpr std::array<std::int64_t, 4> kProductSizes = {128, 256, 512, 1024};
/// On a GPU, whose units small matrices do not fill, products are so many times larger.
inline constexpr std::int64_t kDeviceProductFactor = 8;
inline constexpr std::size_t kProductLayouts = 2;  ///< of the right matrix, as kernels differ by it
inline constexpr std::size_t kProductKinds = kProductSizes.size() * kProductLayouts;

/// One moment of one rank: operations per second by kind, sizes outermost; 0: not tried.
using ProductRates = std::array<double, kProductKinds>;

struct GemmCeiling {
  double flops_per_second = 0;  ///< of all ranks together
  std::int64_t size = 0;        ///< of the square matrices that reached it
  int threads = 1;              ///< of all ranks together
};

/// Multiplies for some tens of milliseconds a kind, on the calling thread and those of ATen, or on
/// the device, whose end it waits for.
[[nodiscard]] ProductRates time_products(Dtype dtype,
                                         c10::Device device = c10::Device(c10::DeviceType::CPU));

/// `moments[r]` are those of rank r, as many on every rank. A kind that a rank has not tried at a
/// moment does not count there.
[[nodiscard]] GemmCeiling ceiling_of(std::span<const std::span<const ProductRates>> moments,
                                     int threads);

}  // namespace isoshard
