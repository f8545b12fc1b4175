// SPDX-License-Identifier: Apache-2.0
// Square products, each kind for some tens of milliseconds.
#include "suite/bench/gemm_ceiling.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "core/tensor/convert.h"
#include "core/tensor/device.h"
#include "subjects/model/ops/linear.h"

namespace isoshard {
namespace {

constexpr double kSecondsAKind = 0.02;
/// Above the second size none is tried whose single product would take longer.
constexpr double kLongestProduct = 0.06;

double seconds_from(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double flops_of(std::int64_t size) {
  return 2.0 * static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
}

// As the layers multiply: where LibTorch has no kernels of 16 bits, by widening.
double rate_of(const at::Tensor& a, const at::Tensor& right) {
  at::Tensor product = apply_linear(a, right.t());
  synchronize(a.device());
  const auto start = std::chrono::steady_clock::now();
  double flops = 0, seconds = 0;
  while (seconds < kSecondsAKind) {
    product = apply_linear(a, right.t());
    synchronize(a.device());
    flops += flops_of(a.size(0));
    seconds = seconds_from(start);
  }
  return flops / seconds;
}

}  // namespace

ProductRates time_products(Dtype dtype, c10::Device device) {
  ProductRates rates{};
  double best = 0;
  const auto options = at::TensorOptions().dtype(scalar_type_of(dtype)).device(device);
  for (std::size_t i = 0; i < kProductSizes.size(); ++i) {
    const std::int64_t size = kProductSizes[i] * (device.is_cpu() ? 1 : kDeviceProductFactor);
    if (i > 1 && flops_of(size) > kLongestProduct * best) break;
    const at::Tensor a = at::ones({size, size}, options), b = at::ones({size, size}, options);
    rates[i * kProductLayouts] = rate_of(a, b);
    rates[i * kProductLayouts + 1] = rate_of(a, b.t());
    best = std::max({best, rates[i * kProductLayouts], rates[i * kProductLayouts + 1]});
  }
  return rates;
}

GemmCeiling ceiling_of(std::span<const std::span<const ProductRates>> moments, int threads) {
  GemmCeiling ceiling;
  ceiling.threads = threads;
  const std::size_t num_moments = moments.empty() ? 0 : moments.front().size();
  for (std::size_t moment = 0; moment < num_moments; ++moment) {
    for (std::size_t kind = 0; kind < kProductKinds; ++kind) {
      double sum = 0;
      const bool is_tried = std::ranges::all_of(moments, [&](const auto& rank) {
        sum += rank[moment][kind];
        return rank[moment][kind] > 0;
      });
      if (!is_tried || sum <= ceiling.flops_per_second) continue;
      ceiling.flops_per_second = sum;
      ceiling.size = kProductSizes[kind / kProductLayouts];
    }
  }
  return ceiling;
}

}  // namespace isoshard
